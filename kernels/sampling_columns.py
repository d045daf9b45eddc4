"""What a draw is asked and what it answers, as columns with one entry a row.

Shapes: R rows, V tokens of the vocabulary, P rows with penalties, N biases.
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


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What was drawn. The two log-probabilities may be the same tensor: treat it as read-only.

    Attributes:
        tokens_R: int64.
        logprobs_R: log-probability under the raw logits at the row's temperature, before every processor but that one.
        behavior_logprobs_R: log-probability under the processed and truncated distribution (for a greedy row at
            temperature 1).
        nan_R: bool, the row has no distribution; its token is 0 and its log-probabilities are NaN.
    """

    tokens_R: Tensor
    logprobs_R: Tensor
    behavior_logprobs_R: Tensor
    nan_R: Tensor
