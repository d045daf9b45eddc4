"""The CPU table of docs/benchmarks.md: generated tokens/s by number of sequences, from sweeps of one experiment.

    python -m paged run -m experiment=cpu_batching numerics=fast,invariant workload.num_prompts=1,2,4,8,16,32
    python benchmarks/batching_table.py SWEEP_FOLDER [SWEEP_FOLDER ...]

Takes the median over the sweeps given and ends with exit code 1 if a ratio misses its goal.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from omegaconf import OmegaConf


def main() -> int:
    """Print the table and the ratios."""
    rates: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sweep in sys.argv[1:]:
        for summary in sorted(Path(sweep).glob("*/summary.json")):
            config = OmegaConf.load(summary.parent / ".hydra" / "config.yaml")
            rate = json.loads(summary.read_text())["tokens_per_s_end_to_end"]
            rates[config.numerics.name][config.workload.num_prompts].append(rate)
    median = {name: {n: statistics.median(r) for n, r in sorted(by_n.items())} for name, by_n in rates.items()}
    counts = sorted(median["fast"])
    print("| sequences | " + " | ".join(map(str, counts)) + " |\n" + "|---" * (len(counts) + 1) + "|")
    for name, by_count in median.items():
        print(f"| {name} | " + " | ".join(f"{by_count[n]:,.0f}" for n in counts) + " |")
    ratios = {
        "fast, 32 over 1 (at least 4.5)": (median["fast"][32] / median["fast"][1], 4.5),
        "invariant, 16 over 1 (at least 4)": (median["invariant"][16] / median["invariant"][1], 4.0),
        "invariant over fast, at 1 (at least 0.4)": (median["invariant"][1] / median["fast"][1], 0.4),
    }
    for name, (ratio, _) in ratios.items():
        print(f"{name}: {ratio:.2f}")
    return int(any(ratio < goal for ratio, goal in ratios.values()))


if __name__ == "__main__":
    sys.exit(main())
