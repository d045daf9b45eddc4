"""The job of `python -m paged plan`: memory, link and decode steps on paper, and what does not fit, as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig

from paged.config.groups import GIVEN_SOURCE
from paged.config.plan import PlanConfig, plan_config
from paged.core.hardware import Figure, Hardware
from paged.core.memory import (
    GIB,
    SAMPLING_BYTES,
    Deployment,
    Pool,
    logits_bytes,
    padded_attention_bytes,
)
from paged.core.sharding import num_parameters_per_rank
from paged.outcome import OK, in_sweep
from paged.plan_text import plan_text
from paged.results import write_summary
from paged.sim.latency import Roofline
from paged.sim.shape import StepShape
from paged.sim.sweep import Comparison, Goal, read_point
from paged.writing import writing

_LARGEST: Final = ("largest.batch", "largest.context", "largest.step_ms", "largest.tokens_per_s")
"""What the table of a sweep tells of the largest batch."""
_LINK_FIGURES: Final = ("link_bytes_per_s", "link_latency_us", "all_reduce_us", "gather_us")


def job(cfg: DictConfig, folder: Path, overrides: Sequence[str]) -> int:
    """Write the plan that `cfg` describes into `folder` and print it; a sweep's are a table at its end.

    A configuration that does not fit is an answer, too.

    Returns:
        The exit code 0.

    Raises:
        UserError: for a mistake in the config; InfeasibleError for one that cannot be.
    """
    summary = make_plan(plan_config(cfg, overrides))
    write_summary(folder / "summary.json", summary)
    if not in_sweep():
        print(plan_text(summary))
        print(folder, flush=True)
    return OK


def finish_sweep(folder: Path, jobs: Sequence[Path]) -> None:
    """Print the comparison of a sweep's plans, largest pool first, and write it into the sweep's folder."""
    numbers = dict.fromkeys(name for job in jobs for name in read_point(job).numbers)
    sequences = [name for name in numbers if name.startswith("max_concurrency.")]
    comparison = Comparison.of(jobs, Goal("kv_tokens", largest=True), [*sequences, *_LARGEST])
    print(comparison.table())
    with writing(folder):
        comparison.write(folder)


def make_plan(config: PlanConfig) -> dict[str, Any]:
    """The plan as plain data, which `summary.json` holds."""
    deployment = config.deployment
    spec, tp = deployment.spec, deployment.tp
    pool = deployment.pool()
    lengths = sorted({deployment.max_seq_len, *(cap for cap in config.caps if cap <= deployment.max_seq_len)})
    problems = [_problem(deployment, pool, length) for length in lengths if not pool.num_seqs(length)]
    roofline = _roofline(deployment, deployment.hardware)
    latency = list(_latency_rows(config, pool))
    return {
        "title": f"{config.model} on {tp} x {deployment.hardware.name}",
        "model": config.model,
        "hardware": deployment.hardware.name,
        "tp": tp,
        "dtype": deployment.dtype,
        "kv_dtype": deployment.kv_dtype,
        "block_size": deployment.block_size,
        "max_num_seqs": deployment.max_num_seqs,
        "max_seq_len": deployment.max_seq_len,
        "gpu_memory_utilization": deployment.utilization,
        "num_parameters": spec.num_parameters(),
        "num_parameters_per_rank": num_parameters_per_rank(spec, tp),
        "weights_given": deployment.weights_gib is not None,
        "device_bytes": pool.device_bytes,
        "weights_bytes_per_rank": pool.weights_bytes,
        "activation_bytes": pool.activation_bytes,
        "context_bytes": pool.context_bytes,
        "kv_budget_bytes": pool.kv_budget_bytes,
        "pool_fixed": deployment.hardware.pool_gib is not None,
        "kv_bytes_per_token_per_rank": pool.kv_bytes_per_token,
        "kv_head_copies": max(1, tp // spec.num_kv_heads),
        "num_kv_blocks": pool.num_blocks,
        "kv_tokens": pool.kv_tokens,
        "max_concurrency": {str(cap): pool.num_seqs(cap) for cap in config.caps},
        "link_bytes": {
            "layers_per_token": roofline.layers_link_bytes_per_token,
            "embedding_per_token": roofline.embedding_link_bytes_per_token,
            "logits_per_sampled_row": roofline.gather_link_bytes_per_row,
        },
        "latency": latency,
        "largest": _largest(latency),
        "transients": _transients(config, pool),
        "sampling": _sampling(config, pool),
        "feasible": True,
        "fits": bool(pool.num_seqs(deployment.max_seq_len)),
        "reason": problems[-1]["sentence"] if problems else None,
        "problems": problems,
        "figures": _figures(config),
    }


def _roofline(deployment: Deployment, hardware: Hardware) -> Roofline:
    """The lower bound of a step, without the host's time."""
    names = {"dtype": deployment.dtype, "kv_dtype": deployment.kv_dtype}
    return Roofline(deployment.spec, hardware, tp=deployment.tp, **names, host=False)


def _latency_rows(config: PlanConfig, pool: Pool) -> Iterable[dict[str, Any]]:
    """A row for each batch, context and latency of the link, as far as they are told apart."""
    deployment = config.deployment
    hardware = deployment.hardware
    measured = hardware.all_reduce_us is not None and deployment.tp in hardware.all_reduce_us.points
    links: list[tuple[float | None, Hardware]] = [(None, hardware)]
    if deployment.tp > 1 and (config.link_latencies_us is not None or not measured):
        latencies = config.link_latencies_us
        if latencies is None:
            latencies = (hardware.link_latency_us.value, *hardware.other_link_latencies_us)
        given = [Figure(us, "link_latencies_us", True) for us in latencies]
        links = [
            (link.value, replace(hardware, link_latency_us=link, all_reduce_us=None, gather_us=None)) for link in given
        ]
    models = [(us, _roofline(deployment, link)) for us, link in links]
    for batch in config.batches:
        for context in config.contexts:
            for us, model in models:
                parts = model.parts(StepShape.decode(batch, context))
                step_s = sum(parts)
                yield {
                    "batch": batch,
                    "context": context,
                    "link_latency_us": us,
                    "weights_ms": parts.weights_s * 1e3,
                    "compute_ms": parts.compute_s * 1e3,
                    "kv_ms": parts.kv_s * 1e3,
                    "all_reduce_ms": parts.all_reduce_s * 1e3,
                    "gather_ms": parts.gather_s * 1e3,
                    "step_ms": step_s * 1e3,
                    "tokens_per_s": batch / step_s,
                    "fits": context <= deployment.max_seq_len and pool.num_seqs(context) >= batch,
                }


def _largest(latency: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The point of the table with the largest batch that fits, then context; empty if there is none."""
    fitting = [row for row in latency if row["fits"]]
    # Of the link's latencies the first.
    return max(fitting, key=lambda row: (row["batch"], row["context"]), default={})


def _transients(config: PlanConfig, pool: Pool) -> list[dict[str, Any]]:
    """Memory that a step may need for moments and that the plan does not count."""
    deployment = config.deployment
    spec, rows = deployment.spec, deployment.max_num_seqs
    found = [
        (f"float32 logits of {rows:,} rows over {spec.vocab_size:,} tokens", logits_bytes(spec, rows)),
        (f"temporaries of sampling from {rows:,} rows", rows * spec.vocab_size * SAMPLING_BYTES),
    ]
    if config.batches and config.contexts:
        context = min(max(config.contexts), deployment.max_seq_len)
        batch = min(max(config.batches), rows, pool.num_seqs(context))
        if batch:
            padded = padded_attention_bytes(spec, batch, context, deployment.dtype, deployment.tp)
            what = f"keys and values of a layer, padded: {batch:,} sequence{'s' * (batch > 1)} of {context:,} tokens"
            found.append((what, padded))
    return [{"what": what, "bytes": size, "exceeds": size > pool.activation_bytes} for what, size in found]


def _sampling(config: PlanConfig, pool: Pool) -> dict[str, Any]:
    """How many rows can be sampled within the activations' memory and, if too few, what is left with enough of it."""
    deployment = config.deployment
    row_bytes = logits_bytes(deployment.spec, 1) + deployment.spec.vocab_size * SAMPLING_BYTES
    num_rows = pool.activation_bytes // row_bytes
    found: dict[str, Any] = {"max_rows": num_rows, "override": None}
    if num_rows < deployment.max_num_seqs and deployment.hardware.pool_gib is None:
        activation_gib = math.ceil(10 * deployment.max_num_seqs * row_bytes / GIB) / 10
        other = replace(deployment, activation_gib=activation_gib).pool()
        found |= {
            "override": f"memory.activation_gib={activation_gib}",
            "kv_tokens": other.kv_tokens,
            "max_concurrency": {str(cap): other.num_seqs(cap) for cap in config.caps},
            "fits": bool(other.num_seqs(deployment.max_seq_len)),
        }
    return found


def _problem(deployment: Deployment, pool: Pool, length: int) -> dict[str, Any]:
    """Why no sequence of `length` tokens fits, and the changes with which one would."""
    name = f"max_seq_len {length:,}" if length == deployment.max_seq_len else f"{length:,}"
    if pool.kv_budget_bytes < 0:
        why = f"weights, activations and context are {-pool.kv_budget_bytes / GIB:.2f} GiB more than a card may hold"
    else:
        why = f"the pool holds {pool.kv_tokens:,}"
    remedies = [asdict(remedy) for remedy in deployment.remedies(length)]
    if pool.kv_tokens and length == deployment.max_seq_len:
        remedies.append({"override": f"max_seq_len={pool.kv_tokens}", "kv_tokens": pool.kv_tokens})
    needed = None if deployment.hardware.pool_gib is not None else deployment.memory_gib_for(length)
    return {
        "length": length,
        "sentence": f"a sequence of {name} tokens does not fit: {why}",
        "remedies": remedies,
        "memory_gib_needed": needed,
    }


def _figures(config: PlanConfig) -> list[dict[str, Any]]:
    """Every figure that the plan rests on, and who says so."""
    deployment = config.deployment
    hardware, tp = deployment.hardware, deployment.tp
    found: list[dict[str, Any]] = []
    for name, figure in hardware.figures().items():
        if tp == 1 and name in _LINK_FIGURES:
            continue
        if isinstance(figure, Figure):
            value: Any = figure.value
            source, assumed = figure.source, figure.is_assumed(tp)
            if assumed and not figure.assumed:
                source += f"; assumed for {tp}"
        elif tp in figure.points:
            value, source, assumed = {str(tp): figure.points[tp]}, figure.source, figure.assumed
        else:
            continue
        found.append({"name": f"hardware.{name}", "value": value, "source": source, "assumed": assumed})
    for name in ("activation_gib", "context_gib"):
        given = f"memory.{name}" in config.given
        source = GIVEN_SOURCE if given else "an allowance, until a run has measured it"
        value = getattr(deployment, name)
        found.append({"name": f"memory.{name}", "value": value, "source": source, "assumed": not given})
    return found
