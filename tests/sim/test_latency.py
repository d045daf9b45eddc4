"""Checks the roofline against sums written out, and against steps measured on a card."""

from dataclasses import replace

import pytest
from hydra import compose, initialize_config_dir

from paged.config.convert import conf_folder
from paged.config.plan import plan_config
from paged.core.hardware import CollectiveTable, Figure
from paged.core.memory import Deployment
from paged.sim.latency import Roofline
from paged.sim.shape import StepShape


def deployment(*overrides: str) -> Deployment:
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        return plan_config(compose("plan", list(overrides))).deployment


def roofline(where: Deployment, host: bool = True) -> Roofline:
    names = {"dtype": where.dtype, "kv_dtype": where.kv_dtype}
    return Roofline(where.spec, where.hardware, tp=where.tp, **names, host=host)


A10G = deployment()
SHAPES = [
    StepShape.decode(1, 4096),
    StepShape.decode(256, 1024),
    StepShape(2048, 4, 0, 9000, 4000, 2048, 4, 6952, 5_000_000),
    StepShape(300, 101, 101, 70_000, 9000, 200, 1, 800, 180_100),
    StepShape(0, 0, 0, 0, 0),
]


@pytest.mark.parametrize("overrides", [[], ["tp=1"], ["hardware=h200", "tp=2"], ["model=olmoe", "tp=2"]])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_parts_sum_up_to_the_step(overrides: list[str], shape: StepShape) -> None:
    model = roofline(deployment(*overrides))
    assert sum(model.parts(shape)) == pytest.approx(model.step_s(shape) + model.host_s(shape.num_seqs), rel=1e-12)
    assert min(model.parts(shape)) >= 0


def test_a_step_without_rows_is_the_hosts_alone() -> None:
    assert roofline(A10G).step_s(StepShape(0, 0, 0, 0, 0)) == 0
    assert roofline(A10G).host_s(0) == pytest.approx(A10G.hardware.host_step_us.value * 1e-6)


def test_the_host_takes_time_for_a_step_and_for_each_sequence() -> None:
    assert roofline(A10G).host_s(64) == pytest.approx(1400e-6 + 64 * 14e-6)
    assert roofline(A10G, host=False).host_s(64) == 0


def test_a_prefill_is_bound_by_products() -> None:
    where = deployment("tp=1", "hardware=h200")
    tokens = 2048
    shape = StepShape(tokens, 1, 1, tokens, tokens, tokens, 1, 0, tokens * (tokens + 1) // 2)
    parts = roofline(where).parts(shape)
    # Qwen3-8B: q and o 4096 x 4096, k and v 1024 x 4096, three of 12288 x 4096; the head for one row.
    layer = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 12288 * 4096
    products = (2 * 36 * layer * tokens + 2 * 151_936 * 4096) / 784e12
    assert parts.weights_s + parts.compute_s == pytest.approx(products)
    assert parts.compute_s > parts.weights_s
    # Two products of 128 for each of 32 heads, a pair and a layer.
    assert parts.attention_s == pytest.approx(36 * 32 * 2 * 2 * 128 * tokens * (tokens + 1) / 2 / 784e12)
    assert parts.kv_s == pytest.approx(tokens * 147_456 / 4.18e12)


def test_a_chunk_without_a_sample_needs_no_logits() -> None:
    shape = StepShape(512, 1, 0, 512, 512, 512, 1, 0, 131_328)
    assert roofline(A10G).parts(shape).gather_s == 0
    assert roofline(A10G).parts(shape._replace(num_samples=1)).gather_s > 20e-6


def test_collectives_grow_with_tokens_and_vanish_on_one_card() -> None:
    chunk, decode = StepShape(512, 1, 1, 512, 512, 512, 1, 0, 131_328), StepShape.decode(1, 512)
    one = roofline(deployment("tp=1"))
    assert one.parts(chunk).all_reduce_s == one.parts(chunk).gather_s == 0
    four = roofline(A10G)
    grown = four.parts(chunk).all_reduce_s - four.parts(decode).all_reduce_s
    assert grown == pytest.approx(73 * 511 * 8192 * 1.5 / 3e9)


def test_few_tokens_touch_few_experts() -> None:
    where = deployment("model=olmoe", "tp=1", "hardware=h200")
    model = roofline(where, host=False)
    one, many = (model.parts(StepShape.decode(batch, 16)).weights_s for batch in (1, 4096))
    expert = 3 * 1024 * 2048 * 2
    everything = where.weights_bytes / 4.18e12
    assert many == pytest.approx(everything)
    # One token goes through 8 of 64 experts.
    assert everything - one == pytest.approx(16 * 56 * expert / 4.18e12)
    two = model.parts(StepShape.decode(2, 16)).weights_s
    assert two - one == pytest.approx(16 * (8 - 1) * expert / 4.18e12)


def test_a_token_is_multiplied_by_its_own_experts_alone() -> None:
    parts = roofline(deployment("model=olmoe", "tp=1")).parts(StepShape.decode(4096, 16))
    # Four square projections, the router, 8 of 64 experts with three matrices; the head.
    layer = 4 * 2048 * 2048 + 64 * 2048 + 8 * 3 * 1024 * 2048
    products = 4096 * 2 * (16 * layer + 50_304 * 2048) / 70e12
    assert parts.weights_s + parts.compute_s == pytest.approx(products)


def test_an_fp8_cache_is_read_with_its_scales() -> None:
    fp8 = roofline(replace(A10G, kv_dtype="fp8"))
    assert fp8.parts(StepShape.decode(1, 1000)).kv_s == pytest.approx(1000 * 36 * 2 * 2 * 132 / 600e9)


@pytest.mark.parametrize(
    ("rows", "us"),
    [(1, 12.1), (8, 12.4), (64, 14.9), (256, 31.2), (1024, 49.3), (2048, 77.1), (160, 23.05), (4096, 132.7)],
)
def test_measured_all_reduces_are_met_and_joined_by_lines(rows: int, us: float) -> None:
    model = roofline(deployment("hardware=h200", "tp=2"))
    shape = StepShape(rows, 1, 1, rows, rows, rows, 1, 0, 1)
    assert model.parts(shape).all_reduce_s == pytest.approx(73 * us * 1e-6)


def test_below_the_smallest_measured_all_reduce_its_time_stands() -> None:
    table = CollectiveTable({4: ((81_920.0, 10.0), (163_840.0, 11.0))}, "", False)
    model = roofline(replace(A10G, hardware=replace(A10G.hardware, all_reduce_us=table)))
    assert model.parts(StepShape.decode(1, 16)).all_reduce_s == pytest.approx(730e-6)
    assert model.parts(StepShape.decode(15, 16)).all_reduce_s == pytest.approx(766.5e-6)


def test_a_measured_gather_stands_for_latency_and_bandwidth() -> None:
    """By the bytes that `benchmarks/cards.py` writes: rows of 151,936 logits, which the engine gathers in fp32.

    They were once taken for logits of two bytes, so that 512 rows took what 256 had been measured to take.
    """
    table = CollectiveTable({4: ((151_936.0 * 4, 10.0), (151_936.0 * 40, 28.0))}, "", False)
    model = roofline(replace(A10G, hardware=replace(A10G.hardware, gather_us=table)))
    assert model.parts(StepShape.decode(1, 16)).gather_s == pytest.approx(10e-6)
    assert model.parts(StepShape.decode(6, 16)).gather_s == pytest.approx(20e-6)
    with_gather, without = (model.step_s(StepShape(6, 1, samples, 96, 96, 96, 1, 0, 1)) for samples in (6, 0))
    assert with_gather - without == pytest.approx(20e-6)


def test_other_numbers_of_ranks_go_by_latency_and_bandwidth() -> None:
    model = roofline(deployment("hardware=h200", "tp=4"))
    expected = 73 * (12e-6 + 64 * 8192 * 1.5 / 218e9)
    assert model.parts(StepShape.decode(64, 16)).all_reduce_s == pytest.approx(expected)


@pytest.mark.parametrize(
    ("batch", "context", "ms"),
    [(1, 1024, 5.3), (8, 1024, 5.9), (64, 1024, 8.2), (256, 1024, 19.5), (64, 4096, 14.6)],
)
def test_one_h200_decodes_about_as_fast_as_vllm_did_there(batch: int, context: int, ms: float) -> None:
    """Qwen3-8B, vLLM 0.25.1 with CUDA graphs; the file's host time was fitted to these five steps."""
    model = roofline(deployment("model=qwen3_8b", "hardware=h200", "tp=1"))
    seconds = model.step_s(StepShape.decode(batch, context)) + model.host_s(batch)
    assert seconds * 1e3 == pytest.approx(ms, rel=0.07)


def test_an_override_of_a_figure_is_taken() -> None:
    slow = roofline(deployment("hardware.memory_bytes_per_s.value=300e9"), host=False)
    assert slow.parts(StepShape.decode(1, 4096)).weights_s == pytest.approx(2 * 4_095_830_016 / 600e9)
    faster = replace(A10G.hardware, link_latency_us=Figure(0.0, "", True))
    model = roofline(replace(A10G, hardware=faster))
    assert model.parts(StepShape.decode(1, 16)).all_reduce_s == pytest.approx(73 * 8192 * 1.5 / 3e9)
