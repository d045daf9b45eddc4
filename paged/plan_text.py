"""A plan for a person to read: its sections as aligned lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paged.core.memory import GIB

Plan = Mapping[str, Any]
"""What `summary.json` of a plan holds; `paged.planner` makes it."""


def plan_text(summary: Plan) -> str:
    """The plan for a person to read."""
    sections = [
        _memory_lines(summary),
        _latency_lines(summary),
        _problem_lines(summary),
        _transient_lines(summary),
        _figure_lines(summary),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _memory_lines(plan: Plan) -> list[str]:
    counted = f"{plan['num_parameters_per_rank']:,} of {plan['num_parameters']:,} parameters in {plan['dtype']}"
    given = "given by memory.weights_gib"
    device, budget = plan["device_bytes"], plan["kv_budget_bytes"]
    blocks = f"{plan['num_kv_blocks']:,} blocks of {plan['block_size']}"
    if plan["num_kv_blocks"] < budget // (plan["block_size"] * plan["kv_bytes_per_token_per_rank"]):
        blocks += f"; {plan['max_num_seqs']:,} sequences of {plan['max_seq_len']:,} tokens can use no more"
    copies = plan["kv_head_copies"]
    copied = f"; each head is copied to {copies} ranks" if copies > 1 else ""
    rows = [
        ("memory of a card", _gib(device), f"of which {plan['gpu_memory_utilization']:.4g} may be used"),
        ("weights", _gib(plan["weights_bytes_per_rank"]), given if plan["weights_given"] else counted),
        ("activations", _gib(plan["activation_bytes"]), f"memory.activation_gib; {_rows_held(plan)}"),
        ("context" if plan["pool_fixed"] else "CUDA context", _gib(plan["context_bytes"]), "memory.context_gib"),
        ("left for the pool", _gib(budget), "fixed by hardware.pool_gib" if plan["pool_fixed"] else ""),
        ("a token", f"{plan['kv_bytes_per_token_per_rank']:,} B", f"keys and values in {plan['kv_dtype']}{copied}"),
        ("pool", f"{plan['kv_tokens']:,} tokens", blocks),
    ]
    sampling = plan["sampling"]
    for cap, number in plan["max_concurrency"].items():
        note = f"longer than max_seq_len {plan['max_seq_len']:,}" if int(cap) > plan["max_seq_len"] else ""
        if sampling["override"] and not note:
            note = f"with {sampling['override']}: {sampling['max_concurrency'][cap]:,}"
        rows.append((f"at {int(cap):,} tokens", f"{number:,} sequence{'s' * (number != 1)}", note))
    if plan["tp"] > 1:
        link = plan["link_bytes"]
        parts = f"{_kib(link['layers_per_token'])} of the layers, {_kib(link['embedding_per_token'])} of the embedding"
        rows.append(("link, a token", _kib(link["layers_per_token"] + link["embedding_per_token"]), parts))
        rows.append(("link, a sampled row", _kib(link["logits_per_sampled_row"]), "of logits beside that"))
    return [f"{plan['title']}, each rank", *_aligned(rows, right=(1,))]


def _rows_held(plan: Plan) -> str:
    held, most = plan["sampling"]["max_rows"], plan["max_num_seqs"]
    enough = f"max_num_seqs is {most:,}" if held < most else f"max_num_seqs {most:,} is within that"
    return f"room to sample {held:,} sequences at once, {enough}"


def _latency_lines(plan: Plan) -> list[str]:
    if not plan["latency"]:
        return []
    header = ("batch", "context", "link us", "weights ms", "KV ms", "all-reduce ms", "gather ms", "step ms", "tokens/s")
    names = ("kv_ms", "all_reduce_ms", "gather_ms", "step_ms", "tokens_per_s")
    points: dict[tuple[int, int], list[Plan]] = {}
    for row in plan["latency"]:
        points.setdefault((row["batch"], row["context"]), []).append(row)
    rows: list[tuple[str, ...]] = [header]
    for (batch, context), group in points.items():
        links = " / ".join(f"{row['link_latency_us']:g}" for row in group if row["link_latency_us"] is not None)
        # What the products take longer is there instead of the reading of the weights, not beside it.
        first = [_number(group[0]["weights_ms"] + group[0]["compute_ms"])]
        cells = [" / ".join(dict.fromkeys(_number(row[name]) for row in group)) for name in names]
        mark = "" if group[0]["fits"] else "*"
        rows.append((f"{batch:,}{mark}", f"{context:,}", links or "table", *first, *cells))
    if plan["tp"] == 1:
        rows = [(*row[:2], *row[3:5], *row[7:]) for row in rows]
    notes = ["lower bound of a decode step, without the host's time"]
    if any(row["compute_ms"] for row in plan["latency"]):
        notes.append("weights: or their products, where those take longer")
    if not all(row["fits"] for row in plan["latency"]):
        notes.append("* more tokens than the pool holds, or longer than max_seq_len")
    return [notes[0], *_aligned(rows, right=range(9)), *notes[1:]]


def _problem_lines(plan: Plan) -> list[str]:
    lines = []
    for problem in plan["problems"]:
        changes = [f"{each['override']} (pool of {each['kv_tokens']:,} tokens)" for each in problem["remedies"]]
        if problem["memory_gib_needed"] is not None:
            changes.append(f"cards of {problem['memory_gib_needed']:.2f} GiB")
        lines.append(f"  {problem['sentence']}; one of these would do: {', '.join(changes) or 'nothing that is known'}")
    return ["what does not fit", *lines] if lines else []


def _transient_lines(plan: Plan) -> list[str]:
    rows = []
    for each in plan["transients"]:
        note = "more than memory.activation_gib allows" if each["exceeds"] else ""
        rows.append((each["what"], _gib(each["bytes"]), note))
    lines = ["not counted: what a step may need for moments", *_aligned(rows, right=(1,))]
    sampling = plan["sampling"]
    if sampling["override"]:
        effect = f"{sampling['kv_tokens']:,} tokens"
        if plan["fits"] and not sampling["fits"]:
            effect += f", less than a sequence of max_seq_len {plan['max_seq_len']:,}"
        way = f"; or max_num_seqs={sampling['max_rows']}" if sampling["max_rows"] else ""
        lines.append(f"  counted with {sampling['override']}, which leaves a pool of {effect}{way}")
    return lines


def _figure_lines(plan: Plan) -> list[str]:
    rows = []
    for each in plan["figures"]:
        value = f"{each['value']:,.6g}" if isinstance(each["value"], int | float) else "table"
        rows.append((each["name"], value, "assumed" if each["assumed"] else "", each["source"]))
    return ["figures and their sources", *_aligned(rows, right=(1,))]


def _aligned(rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Rows of cells as lines, the columns `right` aligned to their right ends."""
    rows, right = list(rows), set(right)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def _kib(size: float) -> str:
    return f"{size / 1024:,.0f} KiB"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
