"""How a model is cut over ranks: which numbers of ranks are possible, and what one rank holds."""

from __future__ import annotations

from dataclasses import replace

from paged.core.model_spec import ModelSpec


def check_tp(spec: ModelSpec, tp: int) -> None:
    """Refuse a number of ranks that the model can't be cut over.

    Raises:
        ValueError: one sentence that names every divisibility that is violated, by its name in ``config.json``.
    """
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise ValueError(f"tp must be a whole number, at least 1, not {tp!r}")
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


def padded_vocab_size(spec: ModelSpec, tp: int) -> int:
    """The vocabulary with the rows that make it a multiple of ``tp``."""
    return -(-spec.vocab_size // tp) * tp


def local_parameter_shapes(spec: ModelSpec, tp: int) -> dict[str, tuple[int, ...]]:
    """Names of the checkpoint's tensors and the shape of one rank's part of each; raises as ``check_tp`` does."""
    return local_spec(spec, tp).parameter_shapes()


def num_parameters_per_rank(spec: ModelSpec, tp: int) -> int:
    """Number of parameters that one rank holds, padding and copies included; raises as ``check_tp`` does."""
    return local_spec(spec, tp).num_parameters()
