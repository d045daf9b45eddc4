"""Ranks that disagree, fail, die or stall: one clear error within the time limit, and no process left behind."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tp_faults
from engine_tools import serving_calls
from paged import Engine, SamplingParams, engine_ranks
from paged.core.agreement import TPDesyncError, TPError
from paged.core.policy import Fifo
from paged.runner import ranks
from paged.sim.replay import replay
from paged.writing import UnwritableError
from tp_tools import is_there, pids, save_model, state_dict, tp_engine

ROOT = Path(__file__).resolve().parents[2]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=1.0, seed=4, max_tokens=12),
    SamplingParams(temperature=1.0, max_tokens=12),
]
PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8], [9] * 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model")


Plant = Callable[..., Engine]


@pytest.fixture
def plant(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plant]:
    """Makes an engine on all of whose ranks a fault is planted; None plants nothing."""
    made: list[Engine] = []

    def make(fault: str | None, tp: int = 2, **fields: Any) -> Engine:
        if fault is not None:
            monkeypatch.setenv(tp_faults.FAULT, fault)
            monkeypatch.setenv(tp_faults.MARKS, str(tmp_path))
            monkeypatch.setattr(ranks, "FOLLOWER", "tp_faults")
            getattr(tp_faults, fault)(monkeypatch)
        engine = tp_engine(folder, tp, **{"tp_timeout_s": 20, **fields})
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()
        assert not any(is_there(pid) for pid in pids(engine)), "a process is left"


def reached(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("rank*")}


def tokens(engine: Engine) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in engine.generate(PROMPTS, PARAMS, use_tqdm=False)]


def step_to_the_end(engine: Engine, updates: list[Any]) -> None:
    while engine.has_unfinished:
        updates += engine.step()


def assert_ended(engine: Engine, *, is_closed: bool = False) -> None:
    """Nothing can be asked of an engine without its ranks, and it says why; it can be closed."""
    kind, why = (
        (RuntimeError, "the engine is closed") if is_closed else (TPError, "the ranks of this engine have ended")
    )
    with pytest.raises(kind, match=why):
        engine.generate([1, 2], use_tqdm=False)
    deadline = time.monotonic() + 5
    while any(is_there(pid) for pid in pids(engine)):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.01)


# Ranks that disagree


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("seed_by_rank", "the tokens and log-probabilities of the steps before"),
        ("other_logprobs", "the tokens and log-probabilities of the steps before"),
        ("other_requests", "the sequences that start or leave"),
        ("other_chunks", "the rows of the plan"),
        ("lost_request", "the step"),
    ],
)
def test_a_disagreement_is_an_error_on_all_ranks(plant: Plant, tmp_path: Path, fault: str, what: str) -> None:
    tp = 4 if fault == "seed_by_rank" else 2
    engine = plant(fault, tp)
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(prompt, params, f"r{index}")
    updates: list[Any] = []
    with pytest.raises(TPDesyncError) as caught:
        step_to_the_end(engine, updates)
    assert what in str(caught.value)
    assert "at step " in str(caught.value)
    assert caught.value.ranks == tuple(range(tp))
    assert updates == [], "what the ranks disagree on was handed out"
    assert {f"rank{rank}" for rank in range(1, tp)} <= reached(tmp_path)
    assert_ended(engine)


def test_the_control_agrees(plant: Plant, folder: Path) -> None:
    assert tokens(plant(None)) == tokens(tp_engine(folder, 1))


@pytest.mark.parametrize("fault", ["constant_statement", "nothing_compared"])
def test_without_the_comparison_a_disagreement_goes_unnoticed(plant: Plant, tmp_path: Path, fault: str) -> None:
    """The mutants: what `test_a_disagreement_is_an_error_on_all_ranks` expects of the first fault does not happen."""
    engine = plant(f"{fault}_and_seed_by_rank")
    engine.add_request(PROMPTS[1], PARAMS[1])
    updates: list[Any] = []
    step_to_the_end(engine, updates)
    assert updates[-1].output is not None
    assert {"rank0", "rank1"} <= reached(tmp_path)


@pytest.mark.parametrize("fault", ["constant_statement", "nothing_compared"])
def test_the_mutants_alone_do_no_harm(plant: Plant, folder: Path, fault: str) -> None:
    assert tokens(plant(fault)) == tokens(tp_engine(folder, 1))


def test_other_seeds_change_the_tokens(plant: Plant, folder: Path, tmp_path: Path) -> None:
    """The mutant of the seed, uncompared: rank 0 goes on with keys and values of other texts."""
    assert tokens(plant("seed_by_rank", verify=False)) != tokens(tp_engine(folder, 1))
    assert reached(tmp_path) == {"rank0", "rank1"}


# Ranks that are lost


def lose(engine: Engine, limit_s: float) -> str:
    """What the engine says when a rank is lost while it generates."""
    start_s = time.monotonic()
    with pytest.raises(TPError) as caught:
        tokens(engine)
    assert time.monotonic() - start_s < limit_s
    assert not isinstance(caught.value, TPDesyncError)
    assert_ended(engine)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fault", "said", "tp"),
    [
        ("fails_in_a_step", "rank 1 failed: RuntimeError: planted", 2),
        ("fails_in_a_step", "rank 1 failed: RuntimeError: planted", 4),
        ("dies_in_a_step", "rank 1 was killed by SIGKILL", 2),
        ("dies_in_a_step", "rank 1 was killed by SIGKILL", 4),
        ("stops_in_a_step", "rank 1 has not answered within 3 s (tp_timeout_s)", 4),
        ("sleeps_in_a_step", "rank 1 has not answered within 3 s (tp_timeout_s)", 2),
    ],
)
def test_a_rank_that_is_lost_in_a_step_is_named(plant: Plant, tmp_path: Path, fault: str, said: str, tp: int) -> None:
    engine = plant(fault, tp, tp_timeout_s=3)
    assert lose(engine, 15) == said
    assert reached(tmp_path) == {"rank1"}


@pytest.mark.parametrize("is_verifying", [True, False])
def test_a_rank_that_is_killed_between_steps(plant: Plant, is_verifying: bool) -> None:
    engine = plant(None, verify=is_verifying)
    tokens(engine)
    os.kill(pids(engine)[0], signal.SIGKILL)
    assert lose(engine, 5) == "rank 1 was killed by SIGKILL"


def test_a_rank_that_is_stopped_between_steps(plant: Plant) -> None:
    engine = plant(None, tp_timeout_s=3)
    tokens(engine)
    os.kill(pids(engine)[0], signal.SIGSTOP)
    assert lose(engine, 15) == "rank 1 has not answered within 3 s (tp_timeout_s)"


def test_what_all_ranks_agreed_on_is_returned_when_one_is_lost(plant: Plant) -> None:
    engine = plant(None)
    expected = tokens(engine)[0]
    engine.add_request(PROMPTS[0], PARAMS[0], "first")
    updates: list[Any] = []
    while len(updates) < 4:
        updates += engine.step()
    os.kill(pids(engine)[0], signal.SIGKILL)
    with pytest.raises(TPError, match="SIGKILL"):
        step_to_the_end(engine, updates)
    with pytest.raises(TPError, match="the ranks of this engine have ended"):
        engine.add_request(PROMPTS[1], PARAMS[1], "late")
    assert engine.num_waiting == 1, "a refused request is queued"
    (output,) = engine.abort("first")
    assert (output.token_ids, output.finish_reason) == (expected[: len(updates)], "abort")
    assert engine.abort("late") == []
    assert not engine.has_unfinished


def test_the_last_token_of_a_lost_engine_is_not_handed_out(plant: Plant) -> None:
    """The sample had finished at rank 0, and no other rank has said so."""
    engine = plant(None)
    engine.add_request(PROMPTS[0], SamplingParams(temperature=0, max_tokens=2), "first")
    while engine.scheduler.has_unfinished:
        engine.step()
    os.kill(pids(engine)[0], signal.SIGKILL)
    with pytest.raises(TPError, match="SIGKILL"):
        engine.step()
    (output,) = engine.abort("first")
    assert (len(output.token_ids), output.finish_reason) == (1, "abort")
    assert not engine.has_unfinished
    assert engine.abort("first") == []


@pytest.mark.parametrize("fault", ["other_logprobs", "dies_in_a_step"])
def test_the_step_log_holds_what_was_agreed_on(plant: Plant, tmp_path: Path, fault: str) -> None:
    log = tmp_path / "steps.jsonl"
    engine = plant(fault, step_log=log)
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(prompt, params, f"r{index}")
    engine.step()
    engine.add_request([3, 4], PARAMS[0], "late")
    with pytest.raises(TPError):
        step_to_the_end(engine, [])
    engine.abort("r0")
    engine.close()
    events = [json.loads(line)["event"] for line in log.open()]
    assert events.count("commit") == (0 if fault == "other_logprobs" else tp_faults.AT_STEP - 1)
    assert events[-2:] == ["abandon", "abort"]
    assert replay(log).first_difference is None


def test_a_second_ctrl_c_does_not_wait_for_a_stalled_rank(plant: Plant, tmp_path: Path) -> None:
    engine = plant("sleeps_in_a_step", tp_timeout_s=60)

    def press() -> None:
        while reached(tmp_path) != {"rank1"}:
            time.sleep(0.01)
        for _ in range(2):
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    start_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        tokens(engine)
    thread.join()
    assert time.monotonic() - start_s < 10
    assert_ended(engine)


def test_loading_is_watched_over_and_needs_one_machine_for_a_state_dict(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = plant(None)
    leader = engine._leader
    assert leader is not None
    load, seen = engine.executor.load_weights, []  # type: ignore[attr-defined]

    def watched(weights: Any) -> None:
        seen.append((leader._watch._is_entered, leader._watch._is_limited))
        load(weights)

    monkeypatch.setattr(engine.executor, "load_weights", watched)
    engine.load_weights(state_dict(seed=2))
    assert seen == [(True, False)]
    leader.ranks.hosts = ["elsewhere"]
    said = "^weights must be a checkpoint folder, not a state dict: rank 1 is on another machine, elsewhere$"
    with pytest.raises(ValueError, match=said):
        engine.load_weights(state_dict(seed=3))
    assert len(seen) == 1
    assert len(tokens(engine)) == len(PROMPTS)


class Evil(dict[str, torch.Tensor]):
    """A mapping that does not let anybody look."""

    def items(self) -> Any:
        raise RuntimeError("planted")


def no_room(name: str) -> int:
    raise OSError(errno.ENOSPC, "planted")


def test_weights_that_rank_0_cannot_pass_on_leave_all_ranks_as_they_were(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = plant(None)
    # The third is drawn anew each time.
    expected = tokens(engine)[:2]
    good = state_dict(seed=2)
    name, tensor = next(iter(good.items()))
    # Their kinds are on their way out of torch, which warns.
    with warnings.catch_warnings(action="ignore"):
        quantized = torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)
        nested = torch.nested.nested_tensor([tensor])
    for wrong, said in ((quantized, "has dtype torch.qint8, not one of"), (nested, "is no dense tensor with data")):
        with pytest.raises(ValueError, match=f"tensor {name} {said}"):
            engine.load_weights({**good, name: wrong})
    with pytest.raises(RuntimeError, match=r"^planted$"):
        engine.load_weights(Evil(good))
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", no_room)
        with pytest.raises(OSError, match="planted"):
            engine.load_weights(good)
    assert tokens(engine)[:2] == expected
    assert engine.load_weights(good) == 1
    assert tokens(engine)[:2] != expected


def test_a_closed_engine_takes_no_requests(plant: Plant) -> None:
    engine = plant(None)
    engine.add_request(PROMPTS[0], PARAMS[0], "first")
    engine.close()
    for call in serving_calls(engine, PROMPTS[1], PARAMS[1]):
        with pytest.raises(RuntimeError, match=r"^the engine is closed$"):
            call()
    assert engine.num_waiting == 1
    assert [output.token_ids for output in engine.abort("first")] == [[]]
    assert not engine.has_unfinished


def test_a_step_log_that_cannot_be_written_leaves_no_process(folder: Path, tmp_path: Path) -> None:
    def children() -> list[str]:
        return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()

    before = children()
    with pytest.raises(UnwritableError, match="cannot be written"):
        tp_engine(folder, 2, step_log=tmp_path / "no" / "steps.jsonl")
    assert children() == before


def test_a_mistake_that_another_rank_meets_is_told_as_one(plant: Plant, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^the checkpoint has gone$"):
        plant("cannot_load")
    assert reached(tmp_path) == {"rank1"}


def test_a_rank_that_cannot_begin(plant: Plant) -> None:
    with pytest.raises(TPError, match=r"^rank 1 ended with exit code 1: no such library$"):
        plant("dies_at_once")


def test_what_a_rank_cannot_read_is_told_at_once(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    here = ModuleType("only_here")
    here.Mine = type("Mine", (Fifo,), {"__module__": "only_here"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "only_here", here)
    start_s = time.monotonic()
    with pytest.raises(TPError, match=r"^rank 1 failed: ModuleNotFoundError: No module named 'only_here'$"):
        plant(None, policy=here.Mine())
    assert time.monotonic() - start_s < ranks.START_S / 2


def test_a_rank_that_fails_before_there_is_a_group_is_named(
    plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_store = engine_ranks.serve_store
    monkeypatch.setattr(engine_ranks, "serve_store", lambda host, limit_s: serve_store(host, 2))
    monkeypatch.setattr(ranks, "START_S", 2)
    with pytest.raises(TPError, match=r"^rank 1 failed: RuntimeError: planted$"):
        plant("cannot_meet")
    assert reached(tmp_path) == {"rank1"}


def test_the_pool_is_the_least_that_any_rank_has_room_for(plant: Plant, folder: Path, tmp_path: Path) -> None:
    engine = plant("less_room", num_blocks=None)
    assert reached(tmp_path) == {"rank1"}
    assert engine.scheduler.config.num_blocks == 20
    assert tokens(engine) == tokens(tp_engine(folder, 1))


# Rank 0 and its user


def test_ctrl_c_falls_between_steps_and_the_ranks_serve_on(plant: Plant) -> None:
    engine = plant(None)
    expected = tokens(engine)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, SamplingParams(max_tokens=60), use_tqdm=False)
    assert not engine.has_unfinished
    seeded = engine.generate(PROMPTS[:2], PARAMS[:2], use_tqdm=False)
    assert [result.outputs[0].token_ids for result in seeded] == expected[:2]


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_copy_of_the_process_ends_no_ranks(plant: Plant) -> None:
    engine = plant(None)
    expected = tokens(engine)[:2]
    if (pid := os.fork()) == 0:
        engine.close()
        os._exit(0)
    assert os.waitpid(pid, 0) == (pid, 0)
    assert all(map(is_there, pids(engine)))
    assert tokens(engine)[:2] == expected


def test_ctrl_c_waits_until_the_ranks_have_ended(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = plant(None)
    assert engine._leader is not None
    end = engine._leader.ranks.end
    # It can't leave by itself.
    os.kill(pids(engine)[0], signal.SIGSTOP)

    def pressed(grace_s: float) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        end(grace_s)

    with monkeypatch.context() as patch:
        patch.setattr(engine._leader.ranks, "end", pressed)
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    assert_ended(engine, is_closed=True)


@pytest.mark.parametrize("moment", ["_watch.stop", "ranks.end"])
def test_closing_that_was_interrupted_can_be_repeated(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    engine = plant(None)
    owner, _, name = moment.partition(".")
    # It can't leave by itself.
    os.kill(pids(engine)[0], signal.SIGSTOP)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(getattr(engine._leader, owner), name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    assert all(map(is_there, pids(engine)))
    engine.close()
    assert_ended(engine, is_closed=True)


SCRIPT = """
import sys
from paged import Engine, SamplingParams
engine = Engine.from_pretrained({folder!r}, tp=2, device="cpu", num_blocks=64, block_size=4)
print(*[process.pid for process in engine._leader.ranks.processes], flush=True)
{rest}
"""


@pytest.mark.parametrize(
    ("rest", "code"),
    [
        ("", 0),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("while True: engine.generate([1, 2, 3], SamplingParams(max_tokens=30), use_tqdm=False)", -9),
    ],
    ids=["forgotten", "killed", "killed in a step"],
)
def test_no_process_outlives_rank_0(folder: Path, rest: str, code: int) -> None:
    program = SCRIPT.format(folder=str(folder), rest=rest)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    others = [int(word) for word in process.stdout.readline().split()]
    assert len(others) == 1
    if rest.startswith("while"):
        time.sleep(0.3)
        assert all(map(is_there, others))
        process.kill()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    deadline = time.monotonic() + 5
    while any(map(is_there, others)):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.02)


def test_an_engine_that_nobody_holds_ends_its_ranks(folder: Path) -> None:
    engine = tp_engine(folder, 2)
    others = pids(engine)
    assert all(map(is_there, others))
    del engine
    gc.collect()
    assert not any(map(is_there, others))
