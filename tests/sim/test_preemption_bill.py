"""The bill of preemption through the simulator: the study's numbers, to the token, on a clock that counts steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from paged.app import main
from paged.config.convert import conf_folder
from paged.config.sim import sim_config
from paged.core.metrics import Counters
from paged.core.scheduler import Scheduler
from paged.sim.driver import simulate

POOLS = range(20, 41)
MINIMUM = 445  # (4 + 64 - 1) + 6 x (24 + 40 - 1)


def bill(num_blocks: int, *policy: str) -> Counters:
    overrides = ["experiment=preemption_bill", f"num_blocks={num_blocks}", *policy]
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config = sim_config(compose("sim", overrides))
    setting = config.setting()
    record = simulate(config.workload.jobs(), Scheduler(setting.limits, config.policy), setting.latency)
    assert [r.finish_reason for r in record.requests] == ["length"] * 7
    return record.counters


@pytest.mark.parametrize("policy", [("policy=fifo",), ("policy.fraction=0",)])
def test_fifo_pays_what_the_study_paid(policy: tuple[str, ...]) -> None:
    """The arrival at the end of step k is there for the plan after it: times stand for steps."""
    bills = {num_blocks: bill(num_blocks, *policy) for num_blocks in POOLS}
    paid = {num_blocks: (b.num_preemptions, b.forward_tokens) for num_blocks, b in bills.items()}
    assert {pool: paid[pool] for pool in (20, 26, 32, 40)} == {20: (7, 681), 26: (10, 818), 32: (7, 671), 40: (7, 727)}
    preemptions, tokens = zip(*paid.values(), strict=True)
    assert (min(preemptions), max(preemptions)) == (7, 10)
    assert (min(tokens), max(tokens)) == (671, 818)
    assert all(b.forward_tokens - b.recomputed_tokens == MINIMUM for b in bills.values())


def test_a_watermark_pays_less_and_a_reservation_nothing() -> None:
    for num_blocks in (20, 26, 32, 40):
        tenth, reserved = bill(num_blocks, "policy.fraction=0.1"), bill(num_blocks, "policy=reserve")
        assert tenth.forward_tokens < bill(num_blocks, "policy=fifo").forward_tokens
        assert (reserved.num_preemptions, reserved.forward_tokens) == (0, MINIMUM)


def test_the_command_sweeps_the_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["sim", "-m", "experiment=preemption_bill", "num_blocks=26,40", f"hydra.sweep.dir={tmp_path}"])
    assert code == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path)
    rows = {}
    for folder in sorted(tmp_path.iterdir()):
        if (folder / "summary.json").is_file():
            summary = json.loads((folder / "summary.json").read_text())
            rows[folder.name] = (summary["kv_tokens"], summary["preemptions"], summary["forward_tokens"])
    assert len(rows) == 12, "two pools under six watermarks"
    assert rows["0"] == (26 * 4, 10, 818)
    assert rows["6"] == (40 * 4, 7, 727)
