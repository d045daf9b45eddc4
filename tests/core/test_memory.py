"""Checks the arithmetic of memory: bytes of a token, the pool, and what would let a sequence fit."""

from dataclasses import replace

import pytest
from hydra import compose, initialize_config_dir

from paged.config.convert import conf_folder
from paged.config.plan import plan_config
from paged.core.memory import (
    GIB,
    KV_DTYPE_BYTES,
    Deployment,
    kv_budget_bytes,
    kv_token_bytes,
    logits_bytes,
    num_blocks_for,
    num_blocks_in,
    padded_attention_bytes,
)


def deployment(*overrides: str) -> Deployment:
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        return plan_config(compose("plan", list(overrides))).deployment


GOEDEL = deployment()


@pytest.mark.parametrize(("tokens", "size", "blocks"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (7, 1, 7)])
def test_blocks_for_tokens_round_up(tokens: int, size: int, blocks: int) -> None:
    assert num_blocks_for(tokens, size) == blocks


@pytest.mark.parametrize(
    ("model", "tp", "expected"),
    [("qwen3_8b", 1, 147_456), ("mistral7b", 1, 131_072), ("qwen3_8b", 4, 36_864), ("qwen3_8b", 8, 18_432)],
)
def test_bytes_of_a_token_are_those_of_the_formula(model: str, tp: int, expected: int) -> None:
    assert kv_token_bytes(deployment(f"model={model}").spec, "bfloat16", tp) == expected


def test_copied_heads_save_nothing() -> None:
    assert kv_token_bytes(GOEDEL.spec, "bfloat16", 16) == kv_token_bytes(GOEDEL.spec, "bfloat16", 8)


def test_an_fp8_cache_counts_its_scales() -> None:
    spec = GOEDEL.spec
    # 36 layers, keys and values, 8 heads: 128 bytes and a scale of 4.
    assert kv_token_bytes(spec, "fp8") == 36 * 2 * 8 * (128 + 4)
    assert kv_token_bytes(spec, "float8_e4m3fn", 4) == 36 * 2 * 2 * (128 + 4)


def test_the_dtypes_are_those_of_the_engine() -> None:
    from paged.engine_config import KV_DTYPES

    assert {name: dtype.itemsize for name, dtype in KV_DTYPES.items()} == KV_DTYPE_BYTES


def test_the_engine_sizes_its_pool_by_the_same_arithmetic() -> None:
    import torch

    from paged.engine_config import CPU_POOL_BYTES, EngineConfig, sized_num_blocks

    fp8, budget = torch.float8_e4m3fn, CPU_POOL_BYTES
    plan = deployment("hardware=cpu", "model=tiny", "tp=1", "kv_dtype=fp8", "max_num_seqs=100000")
    config = EngineConfig(kv_dtype="fp8", max_num_seqs=100_000)
    limit = plan.max_seq_len
    blocks = sized_num_blocks(config, plan.spec, fp8, budget, limit)
    assert blocks == plan.pool().num_blocks == CPU_POOL_BYTES // (16 * kv_token_bytes(plan.spec, "fp8"))
    few = sized_num_blocks(config.replaced(max_num_seqs=3), plan.spec, torch.bfloat16, budget, limit)
    assert few == replace(plan, max_num_seqs=3, kv_dtype="bfloat16").pool().num_blocks == 3 * limit // 16


def test_the_budget_is_what_the_rest_leaves() -> None:
    assert kv_budget_bytes(1000, 0.9, 500, 100) == 300
    assert kv_budget_bytes(1000, 0.5, 500, 100) == -100
    assert num_blocks_in(300, 64, max_num_seqs=9, max_blocks=9) == 4
    assert num_blocks_in(300, 64, max_num_seqs=1, max_blocks=3) == 3
    assert num_blocks_in(-100, 64, max_num_seqs=9, max_blocks=9) == 0


def test_a_sequences_last_token_needs_no_place() -> None:
    pool = GOEDEL.pool()
    assert pool.num_seqs(1) == pool.num_seqs(17) == pool.num_blocks
    assert pool.num_seqs(18) == pool.num_seqs(33) == pool.num_blocks // 2
    assert pool.kv_tokens == pool.num_blocks * 16


def test_the_pool_is_no_larger_than_its_sequences_can_use() -> None:
    assert replace(GOEDEL, max_num_seqs=2, max_seq_len=100).pool().num_blocks == 14


def test_transients_are_those_of_the_study() -> None:
    assert padded_attention_bytes(GOEDEL.spec, 64, 4800, "bfloat16") == 64 * 8 * 4800 * 128 * 2 * 2
    assert padded_attention_bytes(GOEDEL.spec, 64, 4800, "bfloat16") / GIB == pytest.approx(1.17, abs=0.005)
    assert padded_attention_bytes(GOEDEL.spec, 64, 4800, "bfloat16", 4) * 4 == 64 * 8 * 4800 * 128 * 2 * 2
    assert logits_bytes(GOEDEL.spec, 256) == 256 * 151_936 * 4


@pytest.mark.parametrize(
    ("overrides", "length"),
    [
        (["tp=1"], 40_960),
        (["tp=1"], 30_000),
        (["tp=1"], 26_300),
        (["tp=1", "gpu_memory_utilization=0.6"], 16_384),
        (["tp=1", "gpu_memory_utilization=0.5", "hardware=l4"], 4_096),
        (["tp=1", "kv_dtype=fp8", "gpu_memory_utilization=0.7"], 40_960),
        (["memory.activation_gib=1000"], 16_384),
        (["memory.context_gib=15.9"], 16_384),
        (["memory.weights_gib=1000"], 16_384),
    ],
)
def test_each_remedy_suffices_and_is_the_least_of_its_kind(overrides: list[str], length: int) -> None:
    before = deployment(*overrides)
    assert not before.pool().num_seqs(length)
    remedies = before.remedies(length)
    assert remedies
    for remedy in remedies:
        after = deployment(*overrides, remedy.override)
        assert after.pool().kv_tokens == remedy.kv_tokens
        assert after.pool().num_seqs(length)
        key, value = remedy.override.split("=")
        if key == "gpu_memory_utilization":
            less = replace(before, utilization=round(float(value) - 0.01, 2))
            assert not less.pool().num_seqs(length)
        if key in ("memory.activation_gib", "memory.context_gib"):
            name = key.removeprefix("memory.")
            assert not replace(before, **{name: round(float(value) + 0.01, 2)}).pool().num_seqs(length)
    keys = [remedy.override.split("=")[0] for remedy in remedies]
    assert all(key in keys for key in (override.split("=")[0] for override in overrides) if key.startswith("memory."))
    needed = before.memory_gib_for(length)
    assert deployment(*overrides, f"hardware.memory_gib.value={needed}").pool().num_seqs(length) == 1
    assert not deployment(*overrides, f"hardware.memory_gib.value={needed - 0.02}").pool().num_seqs(length)


def test_weights_that_are_given_are_shared_out_over_more_ranks() -> None:
    before = deployment("tp=2", "memory.weights_gib=17")
    remedy = before.remedies(40_960)[-1]
    assert remedy.override == "tp=4"
    assert remedy.kv_tokens == deployment("tp=4", "memory.weights_gib=8.5").pool().kv_tokens


def test_what_does_not_suffice_is_no_remedy() -> None:
    # At 0.9 one card holds 26,192 tokens; all of its memory would not hold 40,960, and fp8 cannot shrink the weights.
    assert [remedy.override for remedy in deployment("tp=1").remedies(40_960)] == ["kv_dtype=fp8", "tp=2"]
    tight = deployment("tp=1", "gpu_memory_utilization=0.6")
    assert [remedy.override for remedy in tight.remedies(40_960)] == ["tp=2"]
    assert deployment("model=mistral7b", "tp=32").remedies(10**9) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dtype": "int8"}, "dtype must be one of float64, float32, bfloat16, float16, not 'int8'"),
        ({"kv_dtype": "int8"}, "kv_dtype must be one of .*, fp8, float8_e4m3fn, not 'int8'"),
        ({"utilization": 0.0}, r"gpu_memory_utilization must be above 0 and at most 1, not 0\.0"),
        ({"block_size": 0}, "block_size must be a whole number, at least 1, not 0"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a whole number, at least 1, not 0"),
        ({"weights_gib": -1.0}, r"memory\.weights_gib must be a number, at least 0, not -1\.0"),
        ({"context_gib": float("nan")}, r"memory\.context_gib must be a number, at least 0, not nan"),
        ({"tp": 3}, "tp must divide num_attention_heads 32, and divide or be a multiple of num_key_value_heads 8"),
    ],
)
def test_a_wrong_value_gets_one_sentence(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(GOEDEL, **changes)
