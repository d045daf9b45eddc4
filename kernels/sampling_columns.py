"""Owns the columns that say how each row of logits is sampled.

Shapes: R rows, V token ids, P rows with penalties, N entries of the logit biases.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of the rows that have any.

    Attributes:
        rows_P: int64, distinct row numbers of the logits.
        repetition_P, presence_P, frequency_P: float64; 1, 0 and 0 do nothing.
        output_counts_PV: int32, how often each token was generated.
        prompt_mask_PV: bool, whether the prompt holds the token.
    """

    rows_P: Tensor
    repetition_P: Tensor
    presence_P: Tensor
    frequency_P: Tensor
    output_counts_PV: Tensor
    prompt_mask_PV: Tensor


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Biases as triplets: ``values_N[i]`` is added to the logit of ``token_ids_N[i]`` in row ``rows_N[i]``.

    Attributes:
        rows_N, token_ids_N: int64; no pair twice.
        values_N: float64, finite.
    """

    rows_N: Tensor
    token_ids_N: Tensor
    values_N: Tensor


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """How each row is sampled, one entry a row; ``None`` says that no row of the batch asks for it.

    Attributes:
        temperature_R: float64; 0 is greedy.
        seeds_R: int64, the bit pattern of the unsigned 64-bit seed of the row's stream.
        positions_R: int64, the position that the drawn token will have in its sequence.
        top_k_R: int64; 0 or less, or V or more, keeps all.
        top_p_R: float64; 1 keeps all.
        min_p_R: float64; 0 keeps all.
        penalties: of the rows that have any.
        bias: of the rows that have any.
    """

    temperature_R: Tensor
    seeds_R: Tensor
    positions_R: Tensor
    top_k_R: Tensor | None = None
    top_p_R: Tensor | None = None
    min_p_R: Tensor | None = None
    penalties: Penalties | None = None
    bias: LogitBias | None = None
