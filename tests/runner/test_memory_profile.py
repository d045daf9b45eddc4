"""Checks what a card's memory is said to be used for: the arithmetic anywhere, the measuring itself on a card."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from card_tools import needs_card
from paged.core.memory import GIB
from paged.engine_config import EngineConfig
from paged.kernels.numerics import Numerics
from paged.other_ranks import Alone
from paged.runner import memory_profile
from paged.runner.kv_cache import KVCache
from paged.runner.memory_profile import (
    MOST_CONTEXT_BYTES,
    CardMemory,
    MemoryProfile,
    StepLimits,
    check_share,
    measure_profile,
    run_step,
)
from paged.runner.runner import TorchRunner
from tests.engine_tools import SPEC, VOCAB, random_decoder

CPU = torch.device("cpu")
MIB = 2**20
PROFILE = MemoryProfile(
    device_bytes=1000, weights_bytes=300, activation_bytes=50, context_bytes=40, graph_bytes=10, table_bytes=2
)
LIMITS = StepLimits(max_num_seqs=4, max_step_tokens=20, chunk_size=8, block_size=4, max_seq_len=100, pool_tokens=1000)


def card(*, free: int, reserved: int = 0, allocated: int = 0) -> CardMemory:
    return CardMemory(24 * GIB, free, reserved, allocated)


def test_the_pool_is_what_all_else_leaves_of_the_share() -> None:
    assert PROFILE.pool_bytes(1.0) == 598
    assert PROFILE.pool_bytes(0.9) == 498
    assert PROFILE.pool_bytes(0.3) == -102
    for name in ("weights_bytes", "activation_bytes", "context_bytes", "graph_bytes", "table_bytes"):
        more = replace(PROFILE, **{name: getattr(PROFILE, name) + 7})
        assert more.pool_bytes(0.9) == 491, name


def test_a_card_of_ones_own_has_a_context_and_no_others() -> None:
    before = card(free=24 * GIB - 500)
    assert before.others == 0
    # Libraries came, and torch's own memory is not theirs.
    assert before.context(card(free=14 * GIB - 800, reserved=10 * GIB, allocated=9 * GIB)) == 800


def test_what_others_hold_is_theirs() -> None:
    before = card(free=24 * GIB - MOST_CONTEXT_BYTES - 6 * GIB)
    assert before.others == 6 * GIB
    assert before.context(card(free=17 * GIB - 70)) == MOST_CONTEXT_BYTES + 70
    # Tensors of another engine in the same process are no less in the way.
    assert card(free=20 * GIB, reserved=4 * GIB, allocated=3 * GIB).others == 3 * GIB


def test_processes_of_ours_that_share_a_card_are_not_others() -> None:
    """Nobody knows which of them has how much of what lies outside the allocators: each counts as the most."""
    taken = 3 * MOST_CONTEXT_BYTES
    before = replace(card(free=24 * GIB - taken), num_sharing=3)
    assert before.others == 0
    assert replace(card(free=24 * GIB - taken - 5 * GIB), num_sharing=3).others == 5 * GIB
    after = replace(card(free=14 * GIB - taken, reserved=GIB, allocated=GIB), num_sharing=3)
    assert before.context(after) == MOST_CONTEXT_BYTES


def test_a_share_that_others_hold_is_refused_with_what_is_left() -> None:
    check_share(0.75, 24 * GIB, 18 * GIB)
    sentence = "must be at most 0.7 here, because 7.0 of the card's 24.0 GiB are in use already, not 0.75"
    with pytest.raises(ValueError, match=f"^gpu_memory_utilization {sentence}$"):
        check_share(0.75, 24 * GIB, 17 * GIB)
    check_share(0.7, 24 * GIB, 17 * GIB)


def test_the_largest_steps_are_as_large_as_the_limits_let_them_be() -> None:
    assert LIMITS.chunks() == ([0, 0, 0], [8, 8, 4])
    assert LIMITS.decodes() == ([99] * 4, [1] * 4)
    assert replace(LIMITS, pool_tokens=41).decodes() == ([9] * 4, [1] * 4)
    assert replace(LIMITS, pool_tokens=0).decodes() == ([0] * 4, [1] * 4)
    assert replace(LIMITS, max_step_tokens=3).decodes() == ([99] * 3, [1] * 3)
    assert replace(LIMITS, max_seq_len=4).chunks() == ([0] * 4, [4] * 4)
    assert LIMITS.num_logits == 64
    assert replace(LIMITS, max_num_seqs=65).num_logits == 65


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_step_of_any_size_needs_one_block(kv_dtype: torch.dtype) -> None:
    cache = KVCache(SPEC, 1, LIMITS.block_size, dtype=kv_dtype)
    for starts, lengths in (LIMITS.chunks(), LIMITS.decodes()):
        for has_penalties in (False, True):
            tokens_R = run_step(
                random_decoder(), cache, starts, lengths, LIMITS.num_logits, has_penalties=has_penalties
            )
            assert tokens_R.shape == (64,)
            assert int(tokens_R.max()) < VOCAB


class FakeCard:
    """Stands for a card of 24 GiB: the weights take 2 GiB, steps 300, 100, 350 MiB, workspaces stay, libraries come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peaks = [300 * MIB, 100 * MIB, 350 * MIB]
        self.allocated = 2 * GIB
        self.outside = 500 * MIB
        for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda *args: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *args: self.allocated)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *args: self.allocated + 5 * MIB)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *args: (self.free, 24 * GIB))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", self.peak)

    @property
    def free(self) -> int:
        return 24 * GIB - self.allocated - 5 * MIB - self.outside

    def peak(self, *args: object) -> int:
        self.allocated += 16 * MIB
        self.outside += 20 * MIB
        return self.allocated - 16 * MIB + self.peaks.pop(0)


@pytest.mark.parametrize(("makes_graphs", "graph_mib"), [(True, 300), (False, 0)])
def test_a_profile_is_made_of_what_the_card_says(
    makes_graphs: bool, graph_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCard(monkeypatch)
    monkeypatch.setattr(memory_profile, "can_graph", lambda *args: makes_graphs)
    before, loaded = card(free=23 * GIB), CardMemory.read(CPU)
    profile = measure_profile(random_decoder(), torch.float32, LIMITS, before, loaded)
    assert profile == MemoryProfile(
        device_bytes=24 * GIB,
        weights_bytes=2 * GIB,
        activation_bytes=398 * MIB,
        context_bytes=560 * MIB,
        graph_bytes=graph_mib * MIB,
        # Tokens of 5 slots and of 101 positions, and 25 blocks.
        table_bytes=4 * 5 * 126,
    )


@dataclass
class Start:
    """What became of a rank's start on a card that is played.

    Attributes:
        happened: what it did, in order; of what is entered also the end.
        limits: of the steps that were measured.
        parts: what was built.
    """

    happened: list[object] = field(default_factory=list)
    limits: StepLimits | None = None
    parts: Any = None


class NotedRanks(Alone):
    """Notes what is asked of the other ranks of a start."""

    def __init__(self, happened: list[object], num_sharing: int) -> None:
        super().__init__()
        self.num_sharing = num_sharing
        self._happened = happened

    def least(self, number: int) -> int:
        self._happened.append(("least", number))
        return number

    def meet(self) -> None:
        self._happened.append("meet")

    @contextmanager
    def computing(self, *, is_limited: bool = True) -> Iterator[None]:
        self._happened.append("limited" if is_limited else "unlimited")
        yield
        self._happened.append("computed")


def start_on_card(config: EngineConfig, monkeypatch: pytest.MonkeyPatch, num_sharing: int = 1) -> Start:
    """Start one of ``num_sharing`` ranks on a card of 24 GiB; weights take 2 GiB, and all else ``PROFILE`` of a MiB."""
    from paged import engine_parts

    start = Start()
    allocated = [0]

    def noted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **fields: Any) -> Any:
            start.happened.append(name)
            return work(*args, **fields)

        return noting

    def load(*args: Any, **fields: Any) -> Any:
        allocated[0] = 2 * GIB
        return random_decoder()

    def build(decoder: Any, cache: KVCache, max_step_tokens: int, num_logits: int, sharing: int) -> None:
        assert (max_step_tokens, num_logits) == (config.max_step_tokens, max(64, config.max_num_seqs))
        assert sharing == num_sharing

    def measure(decoder: Any, kv_dtype: Any, limits: StepLimits, before: CardMemory, loaded: CardMemory) -> Any:
        assert (before.allocated, before.num_sharing, loaded.allocated) == (0, num_sharing, 2 * GIB)
        start.limits = limits
        return replace(PROFILE, device_bytes=MIB)

    def read(device: torch.device, number: int = 1) -> CardMemory:
        return replace(card(free=24 * GIB - allocated[0], allocated=allocated[0]), num_sharing=number)

    def on_cpu(*args: Any, dtype: torch.dtype, device: torch.device) -> KVCache:
        return KVCache(*args, dtype=dtype, device=CPU)

    with monkeypatch.context() as patch:
        patch.setattr(CardMemory, "read", read)
        patch.setattr(engine_parts, "random_decoder", noted("load", load))
        patch.setattr(engine_parts, "build_kernels", noted("build", build))
        patch.setattr(engine_parts, "measure_profile", noted("measure", measure))
        patch.setattr(engine_parts, "KVCache", on_cpu)
        patch.setattr(engine_parts, "TorchRunner", noted("allocate", TorchRunner))
        patch.setattr(Numerics, "numerics_id", lambda self, **what: "")
        blueprint = engine_parts.Blueprint(
            spec=SPEC, folder=None, config=config.replaced(dtype="float32").resolved(CPU)
        )
        ranks = NotedRanks(start.happened, num_sharing)
        start.parts = engine_parts.build_parts(blueprint, torch.device("cuda"), ranks)
    return start


def test_a_start_goes_from_phase_to_phase_together_with_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading and building may take any time, and one rank longer than another, so that all meet before they compute.

    Kernels may take longer to build than a step may last; that a rank is lost meanwhile is to be noticed all the same.
    """
    config = EngineConfig(max_num_seqs=4, max_step_tokens=20, chunk_size=8, block_size=4, num_blocks=7)
    assert start_on_card(config, monkeypatch).happened == [
        ("least", 24 * GIB),
        "load",
        "meet",
        *("unlimited", "build", "computed"),
        "meet",
        *("limited", "measure", "computed"),
        ("least", 7),
        "allocate",
    ]


def test_what_earlier_engines_left_is_collected_before_the_card_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was freed in the middle of a start, whose weights then seemed to take less than nothing."""

    class Left:
        def __init__(self) -> None:
            self.itself = self

    gc.disable()  # It would collect by itself now and then.
    left = weakref.ref(Left())
    assert left() is not None, "the control: only the collector finds it"
    seen: list[object] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(left()))
    config = EngineConfig(max_num_seqs=4, max_step_tokens=20, chunk_size=8, block_size=4, num_blocks=7)
    try:
        start_on_card(config, monkeypatch)
    finally:
        gc.enable()
    assert seen == [None]


def test_an_engine_s_steps_are_measured_at_its_own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(max_num_seqs=4, max_step_tokens=20, chunk_size=8, block_size=4, max_seq_len=100)
    found = [start_on_card(config.replaced(num_blocks=number), monkeypatch).limits for number in (250, None)]
    # 0.9 of 24 GiB less 2 GiB of weights, in tokens of 2 layers, keys and values, 2 heads of 8 numbers of 4 bytes.
    most = (int(0.9 * 24 * GIB) - 2 * GIB) // 256
    assert found == [LIMITS, replace(LIMITS, pool_tokens=most)]


@pytest.mark.parametrize("num_sharing", [1, 4])
def test_ranks_that_share_a_card_get_equal_parts_of_it(num_sharing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(block_size=4, max_num_seqs=100, max_step_tokens=100, gpu_memory_utilization=0.8)
    start = start_on_card(config, monkeypatch, num_sharing)
    assert start.limits is not None
    assert start.limits.pool_tokens == (int(0.8 / num_sharing * 24 * GIB) - 2 * GIB) // 256
    # All but the cache takes 402 bytes; a token 2 layers, keys and values, 2 heads of 8 numbers of 4 bytes.
    assert start.parts.runner.cache.num_blocks == (int(0.8 / num_sharing * MIB) - 402) // (4 * 256)


def test_a_summary_has_the_plan_beside_what_was_measured() -> None:
    """Unmeasured, the plan counts the parameters and allows half a GiB each for activations and context."""
    from paged.engine_parts import Blueprint, _memory_summary, _Terms

    profile = replace(PROFILE, device_bytes=24 * GIB)
    config = EngineConfig(
        block_size=4, max_num_seqs=10**6, gpu_memory_utilization=0.5, dtype="float32", kv_dtype="bfloat16"
    )
    terms = _Terms.of(Blueprint(spec=SPEC, folder=None, config=config), CPU, num_sharing=1)
    found = _memory_summary(terms, profile)
    weights = 4 * SPEC.num_parameters()
    assert found.pop("planned") == {
        "weights_bytes": weights,
        "activation_bytes": GIB // 2,
        "context_bytes": GIB // 2,
        "kv_tokens": (12 * GIB - weights - GIB) // (4 * 128) * 4,
    }
    assert found == {
        "device_bytes": 24 * GIB,
        "weights_bytes": 300,
        "activation_bytes": 50,
        "context_bytes": 40,
        "graph_bytes": 10,
        "table_bytes": 2,
    }


@pytest.mark.parametrize(
    ("stage", "sentence"),
    [
        ("load_decoder", "dtype must be smaller or tp larger: the weights do not fit"),
        ("KVCache", "num_blocks, max_num_seqs or max_seq_len must be smaller: the cache and its tables do not fit"),
        ("TorchRunner.warm_up", r"gpu_memory_utilization \(or num_blocks\), max_num_seqs or max_step_tokens"),
    ],
)
def test_whatever_does_not_fit_at_the_start_is_told_with_what_to_lower(
    stage: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paged import Engine, engine_parts

    def full(*args: object, **fields: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")

    monkeypatch.setattr(f"{engine_parts.__name__}.{stage}", full)
    with pytest.raises(ValueError, match=sentence):
        Engine.from_pretrained("tiny", device="cpu")


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("fields", [{}, {"kv_dtype": "fp8"}, {"max_step_tokens": 512, "max_num_seqs": 300}])
def test_an_engine_stays_within_what_was_measured(fields: dict[str, object]) -> None:
    """The pool is sized by the profile alone; the largest steps then need no more than it allows."""
    from paged import Engine, SamplingParams

    engine = Engine.from_pretrained("tiny", device="cuda", gpu_memory_utilization=0.5, **fields)  # type: ignore[arg-type]
    memory = engine.memory
    assert memory is not None
    weights = engine.executor.decoder.tensors().values()  # type: ignore[attr-defined]
    assert memory["weights_bytes"] >= sum(tensor.numel() * tensor.element_size() for tensor in weights)
    assert (memory["graph_bytes"] > 0) == ("kv_dtype" not in fields), "attention over fp8 is torch's, without graphs"
    assert memory["graph_bytes"] <= memory["activation_bytes"] < 4 * GIB
    assert 0 < memory["context_bytes"] < 2 * GIB
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    params = SamplingParams(n=64, max_tokens=16, top_k=20, top_p=0.9, min_p=0.01, presence_penalty=0.5)
    prompts = [{"prompt_token_ids": [index % 50] * 200} for index in range(40)]
    engine.generate(prompts, params, use_tqdm=False)
    assert torch.cuda.max_memory_allocated() - held <= memory["activation_bytes"]


@pytest.mark.gpu
@needs_card
def test_a_card_that_is_in_use_is_told() -> None:
    from paged import Engine

    total = torch.cuda.get_device_properties(0).total_memory
    taken = torch.empty(total // 4, dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match=r"gpu_memory_utilization must be at most 0\.7\d here"):
        Engine.from_pretrained("tiny", device="cuda", gpu_memory_utilization=0.9)
    del taken
