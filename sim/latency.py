"""How long a step takes: what every latency model answers, and the one that reasons from bandwidths and peaks."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from paged.core.hardware import CollectiveTable, Hardware
from paged.core.memory import DTYPE_BYTES, kv_token_bytes
from paged.core.model_spec import ModelSpec
from paged.core.sharding import local_spec, padded_vocab_size
from paged.sim.shape import StepShape


class LatencyModel(Protocol):
    """Predicts the time of a step: the device's, and the host's, which a deeper pipeline hides behind it."""

    def step_s(self, shape: StepShape) -> float:
        """Seconds that the device computes a step of this shape."""

    def host_s(self, num_seqs: int) -> float:
        """Seconds that the host needs for a step of so many sequences."""


class Constant:
    """Every step takes as long, whatever it computes: a clock that counts steps.

    Args:
        seconds: of a step.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def step_s(self, shape: StepShape) -> float:
        """The seconds given."""
        return self._seconds

    def host_s(self, num_seqs: int) -> float:
        """None."""
        return 0.0


class StepParts(NamedTuple):
    """Where a step's seconds go.

    Attributes:
        weights_s: reading the weights.
        compute_s: what the matrix products take longer than that.
        kv_s: reading keys and values.
        attention_s: the products of attention in prefill.
        all_reduce_s: of the embedding and, twice, of every layer.
        gather_s: of the sampled rows' logits.
        host_s: preparing the step, for it and for each sequence.
    """

    weights_s: float
    compute_s: float
    kv_s: float
    attention_s: float
    all_reduce_s: float
    gather_s: float
    host_s: float


class Lines:
    """Seconds over a number of rows: lines that join measured points, level below the first, the last one for ever.

    Args:
        starts: rows at which each line but the first begins, ascending.
        lines: (seconds at no rows, seconds a row) of each.
    """

    def __init__(self, starts: Sequence[float], lines: Sequence[tuple[float, float]]) -> None:
        self._starts, self._lines = starts, lines

    @classmethod
    def straight(cls, offset: float, slope: float) -> Lines:
        """One line."""
        return cls([], [(offset, slope)])

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Lines:
        """The lines through (rows, seconds), two or more by ascending rows."""
        lines = [(points[0][1], 0.0)]
        for (left, low), (right, high) in pairwise(points):
            slope = (high - low) / (right - left)
            lines.append((low - slope * left, slope))
        return cls([rows for rows, _ in points[:-1]], lines)

    def times(self, number: int) -> Lines:
        """As many times the seconds."""
        return Lines(self._starts, [(number * offset, number * slope) for offset, slope in self._lines])

    def __call__(self, rows: int) -> float:
        """Seconds for so many rows."""
        offset, slope = self._lines[bisect_right(self._starts, rows)]
        return offset + rows * slope


class Roofline:
    """A bound on a step's time from the card's figures and the model's sizes, plus the host's time.

    Weights are read once a step, or multiplied at peak if that takes longer; keys and values are read once; a model
    with experts reads those that the tokens are expected to choose if they choose evenly. Collectives are those of
    Megatron's layout, one after the other: two all-reduces a layer and one of the embedding, in the weights' dtype,
    and an all-gather of the sampled rows' logits, in the same dtype. Measured times of gathers are of fp32 logits,
    which are what the engine has.
    """

    def __init__(
        self, spec: ModelSpec, hardware: Hardware, *, tp: int, dtype: str, kv_dtype: str, host: bool = True
    ) -> None:
        """Prepare the coefficients.

        Args:
            spec: the whole model.
            hardware: card and link.
            tp: number of ranks.
            dtype: name of the weights' and activations' dtype.
            kv_dtype: name of the cache's dtype.
            host: whether the host's time counts.

        Raises:
            ValueError: the model can't be cut over ``tp`` ranks.
        """
        element = DTYPE_BYTES[dtype]
        memory, flops = hardware.memory_bytes_per_s.value, hardware.flops_per_s.value
        local = local_spec(spec, tp)
        shapes = local.parameter_shapes()
        num_parameters = local.num_parameters()
        experts = sum(math.prod(shape) for name, shape in shapes.items() if ".experts." in name)
        head = local.vocab_size * local.hidden_size
        matrices = sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and ".layers." in name)

        self._weights_s = (num_parameters - experts) * element / memory
        self._experts_s = experts * element / memory
        self._missed = 1 - spec.num_experts_per_token / spec.num_experts if spec.num_experts else 0.0
        used = experts * spec.num_experts_per_token / spec.num_experts if spec.num_experts else 0
        self._token_s = 2 * (matrices - experts + used) / flops
        self._sample_s = 2 * head / flops
        self._kv_s = kv_token_bytes(spec, kv_dtype, tp) / memory
        self._pair_s = 4 * local.num_heads * local.head_dim * local.num_layers / flops
        self._host_step_s = hardware.host_step_us.value * 1e-6 if host else 0.0
        self._host_seq_s = hardware.host_seq_us.value * 1e-6 if host else 0.0
        self._tp = tp
        self._num_layers = spec.num_layers
        self._row_bytes = spec.hidden_size * element
        self._logits_row_bytes = padded_vocab_size(spec, tp) * element
        self._gathered_row_bytes = padded_vocab_size(spec, tp) * DTYPE_BYTES["float32"]
        self._all_reduces = self._collective(
            hardware, hardware.all_reduce_us, self._row_bytes, self.embedding_link_bytes_per_token
        ).times(2 * spec.num_layers + 1)
        self._gather = self._collective(
            hardware, hardware.gather_us, self._gathered_row_bytes, self.gather_link_bytes_per_row
        )

    @property
    def layers_link_bytes_per_token(self) -> float:
        """Bytes that a token's all-reduces in the layers move over each rank's link."""
        return 2 * self._num_layers * self.embedding_link_bytes_per_token

    @property
    def embedding_link_bytes_per_token(self) -> float:
        """Bytes that the all-reduce of a token's embedding moves over each rank's link."""
        return self._row_bytes * 2 * (self._tp - 1) / self._tp

    @property
    def gather_link_bytes_per_row(self) -> float:
        """Bytes that gathering a sampled row's logits moves over each rank's link."""
        return self._logits_row_bytes * (self._tp - 1) / self._tp

    def _collective(
        self, hardware: Hardware, table: CollectiveTable | None, row_bytes: float, link_bytes_per_row: float
    ) -> Lines:
        """Seconds of a collective over its rows: as measured, or by the link's two figures.

        Args:
            hardware: whose link.
            table: what was measured of this collective, if anything.
            row_bytes: what each rank gets of a row.
            link_bytes_per_row: what a row moves over each rank's link.
        """
        if self._tp == 1:
            return Lines.straight(0.0, 0.0)
        if table is None or self._tp not in table.points:
            return Lines.straight(
                hardware.link_latency_us.value * 1e-6, link_bytes_per_row / hardware.link_bytes_per_s.value
            )
        return Lines.through([(size / row_bytes, us * 1e-6) for size, us in table.points[self._tp]])

    def step_s(self, shape: StepShape) -> float:
        """Seconds of the device."""
        num_tokens, _, num_samples, kv_tokens, _, _, _, _, pairs = shape
        if not num_tokens:
            return 0.0
        seconds = self._weights_s
        if self._experts_s:
            seconds += self._experts_s * (1.0 - self._missed**num_tokens)
        compute = num_tokens * self._token_s + num_samples * self._sample_s
        if compute > seconds:
            seconds = compute
        seconds += kv_tokens * self._kv_s + pairs * self._pair_s
        if self._tp > 1:
            seconds += self._all_reduces(num_tokens)
            if num_samples:
                seconds += self._gather(num_samples)
        return seconds

    def host_s(self, num_seqs: int) -> float:
        """Seconds of the host."""
        return self._host_step_s + num_seqs * self._host_seq_s

    def parts(self, shape: StepShape) -> StepParts:
        """The same seconds in parts, for tables."""
        if not shape.num_tokens:
            return StepParts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, self._host_step_s)
        weights = self._weights_s + self._experts_s * (1.0 - self._missed**shape.num_tokens)
        compute = shape.num_tokens * self._token_s + shape.num_samples * self._sample_s
        return StepParts(
            weights_s=weights,
            compute_s=max(0.0, compute - weights),
            kv_s=shape.kv_tokens * self._kv_s,
            attention_s=shape.attention_pairs * self._pair_s,
            all_reduce_s=self._all_reduces(shape.num_tokens),
            gather_s=self._gather(shape.num_samples) if shape.num_samples else 0.0,
            host_s=self._host_step_s + shape.num_seqs * self._host_seq_s,
        )
