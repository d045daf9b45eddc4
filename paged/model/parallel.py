"""Tensor parallelism, applied to the one decoder from outside: a rank's decoder is built from the rank's part of the
spec, and the modules that must exchange something are replaced by ones that do."""

from __future__ import annotations

import torch

from paged.core.model_spec import ModelSpec
from paged.kernels.collectives import SINGLE, RankGroup
from paged.kernels.numerics import Numerics
from paged.model.decoder import Decoder


def build_decoder(
    spec: ModelSpec,
    *,
    numerics: Numerics,
    group: RankGroup = SINGLE,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_positions: int | None = None,
) -> Decoder:
    """One rank's decoder; a fresh one holds arbitrary numbers.

    Its ``spec`` is the whole model's, its ``local_spec`` what this rank holds (the cache is made from that one), its
    ``group`` the ranks. ``tensors()`` are this rank's parts. ``forward`` gives the same hidden states on every rank,
    ``logits`` full rows, ``local_logits`` this rank's columns for ``paged.kernels.vocab_parallel``. All ranks call them
    together.

    Raises:
        ValueError: the model can't be cut over the group's ranks, or not with ``numerics.k_segments``.
    """
    raise NotImplementedError


def random_decoder(
    spec: ModelSpec,
    seed: int,
    *,
    numerics: Numerics,
    group: RankGroup = SINGLE,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_positions: int | None = None,
) -> Decoder:
    """One rank's parts of exactly the numbers that ``Decoder.random`` gives one rank; raises as ``build_decoder``."""
    raise NotImplementedError
