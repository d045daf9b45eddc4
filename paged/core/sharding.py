"""How a model is cut over ranks: which numbers of ranks are possible, and what one rank holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paged.core.checks import check_whole
from paged.core.model_spec import ModelSpec

# Modules by the last word of their name: cut in their outputs, or in the inputs of their weight.
VOCABULARY = ("embed_tokens", "lm_head")
BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_norm", "k_norm")
BY_INPUT = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of a tensor: places ``start`` to ``stop - 1`` of dimension ``dim``; ``None``: all of it."""

    dim: int | None = None
    start: int = 0
    stop: int = 0

    @property
    def index(self) -> tuple[slice, ...]:
        """The part as an index of the tensor."""
        if self.dim is None:
            return (slice(None),)
        return (*[slice(None)] * self.dim, slice(self.start, self.stop))


def check_tp(spec: ModelSpec, tp: int) -> None:
    """Refuse a number of ranks that the model can't be cut over.

    Raises:
        ValueError: it is no number of ranks at all; or one sentence that names every divisibility that is violated, by
            its name in ``config.json``.
    """
    check_whole("tp", tp, 1)
    violated = []
    if spec.num_heads % tp:
        violated.append(f"divide num_attention_heads {spec.num_heads}")
    if spec.num_kv_heads % tp and tp % spec.num_kv_heads:
        violated.append(f"divide or be a multiple of num_key_value_heads {spec.num_kv_heads}")
    if spec.intermediate_size % tp:
        experts = " (of each expert)" if spec.num_experts else ""
        violated.append(f"divide intermediate_size {spec.intermediate_size}{experts}")
    if violated:
        raise ValueError(f"tp must {', and '.join(violated)}, not {tp}")


def check_k_segments(spec: ModelSpec, tp: int, k_segments: int) -> None:
    """Refuse segments of the inner products that the model or its ranks can't be cut into; 1 is always possible.

    Raises:
        ValueError: one sentence that names everything that is violated.
    """
    if k_segments == 1:
        return
    violated = [] if k_segments % tp == 0 else [f"be a multiple of tp {tp}"]
    sizes = {"num_attention_heads * head_dim": spec.q_size, "intermediate_size": spec.intermediate_size}
    if spec.qk_norm == "full":
        sizes["num_key_value_heads * head_dim"] = spec.kv_size
    violated += [f"divide {name} {size}" for name, size in sizes.items() if size % k_segments]
    if violated:
        raise ValueError(f"k_segments must {', and '.join(violated)}, not {k_segments}")


def local_spec(spec: ModelSpec, tp: int) -> ModelSpec:
    """One rank's part of the model as a model: fewer heads, a narrower MLP, a slice of the vocabulary.

    The vocabulary is padded to a multiple of ``tp``, and key/value heads are copied where there are more ranks than
    heads. What is as wide as the residual stream is whole on every rank: norms, the router, the biases of ``o`` and
    ``down``. A QK norm over all heads has its weight cut with the heads (its sum of squares then needs an exchange).

    The end tokens are left out, because a rank's vocabulary does not hold them all.

    Raises:
        ValueError: as ``check_tp`` does.
    """
    check_tp(spec, tp)
    return replace(
        spec,
        vocab_size=padded_vocab_size(spec, tp) // tp,
        num_heads=spec.num_heads // tp,
        num_kv_heads=max(1, spec.num_kv_heads // tp),
        intermediate_size=spec.intermediate_size // tp,
        eos_token_ids=(),
    )


def local_part(spec: ModelSpec, name: str, rank: int, tp: int) -> Part:
    """The part of the checkpoint's tensor ``name`` that ``rank`` of ``tp`` holds.

    The last parts of the vocabulary may be shorter than the local tensor, even empty: what is left is padding. Ranks
    that share a key/value head hold the same part.
    """
    module, kind = name.split(".")[-2:]
    if module in VOCABULARY:
        size = padded_vocab_size(spec, tp) // tp
        return Part(0, min(rank * size, spec.vocab_size), min((rank + 1) * size, spec.vocab_size))
    if module in BY_INPUT and kind == "weight":
        size = (spec.q_size if module == "o_proj" else spec.intermediate_size) // tp
        return Part(1, rank * size, (rank + 1) * size)
    if module not in BY_OUTPUT or (module in ("q_norm", "k_norm") and spec.qk_norm != "full"):
        return Part()
    if module in ("k_proj", "v_proj", "k_norm"):
        start = rank * spec.num_kv_heads // tp * spec.head_dim
        return Part(0, start, start + max(1, spec.num_kv_heads // tp) * spec.head_dim)
    size = (spec.q_size if module in ("q_proj", "q_norm") else spec.intermediate_size) // tp
    return Part(0, rank * size, (rank + 1) * size)


def padded_vocab_size(spec: ModelSpec, tp: int) -> int:
    """The vocabulary with the rows that make it a multiple of ``tp``."""
    return -(-spec.vocab_size // tp) * tp


def local_parameter_shapes(spec: ModelSpec, tp: int) -> dict[str, tuple[int, ...]]:
    """Names of the checkpoint's tensors and the shape of one rank's part of each; raises as ``check_tp`` does."""
    return local_spec(spec, tp).parameter_shapes()


def num_parameters_per_rank(spec: ModelSpec, tp: int) -> int:
    """Number of parameters that one rank holds, padding and copies included; raises as ``check_tp`` does."""
    return local_spec(spec, tp).num_parameters()
