"""A model cut over ranks computes what it computes whole: to rounding, and with ``k_segments`` to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oracles import random_folder
from paged.core.model_spec import ModelSpec
from paged.core.sharding import num_parameters_per_rank
from paged.kernels.collectives import SINGLE, RankGroup
from paged.kernels.numerics import Numerics
from paged.model.decoder import Decoder
from paged.model.parallel import build_decoder, random_decoder
from parallel_tools import (
    MISTRAL,
    OLMOE,
    QWEN3,
    SPECS,
    VOCAB,
    Scorer,
    greedy,
    join,
    local_tensors,
    score,
    score_folder,
    score_random,
    texts,
)
from ranks import RankPool

INVARIANT, FAST, SEGMENTS = Numerics(), Numerics(mode="fast"), Numerics(k_segments=4)


@pytest.mark.parametrize("numerics", [INVARIANT, FAST], ids=lambda numerics: numerics.mode)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", SPECS)
def test_logits_equal_those_of_one_rank(rank_pool: RankPool, family: str, size: int, numerics: Numerics) -> None:
    spec = SPECS[family]
    whole = score(Decoder.random(spec, 1, numerics=numerics, dtype=torch.float64), texts(spec.vocab_size))
    assert whole.shape == (31, spec.vocab_size)
    results = rank_pool.run(score_random, spec, numerics, torch.float64, size=size)
    for logits in results:
        torch.testing.assert_close(logits, whole, atol=1e-12, rtol=0)
        assert torch.equal(logits, results[0])
        assert logits.is_contiguous()


def count_collectives(group: RankGroup, spec: ModelSpec) -> dict[str, int]:
    """Collectives of a step with 31 rows and with 1, of their logits, and what the rank holds."""
    decoder = random_decoder(spec, 1, numerics=SEGMENTS, group=group, dtype=torch.float32)
    counts = {"parameters": sum(tensor.numel() for tensor in decoder.tensors().values())}
    for name, which in (("many", texts(spec.vocab_size)), ("one", texts(spec.vocab_size)[-1:])):
        scorer = Scorer(decoder, len(which), 17)
        before = group.num_collectives
        hidden = scorer.hidden(which)
        counts[name] = group.num_collectives - before
        decoder.logits(hidden)
        counts[f"{name}, logits"] = group.num_collectives - before - counts[name]
        before = group.num_collectives
        columns = group.all_gather(decoder.local_logits(hidden))[:, : spec.vocab_size]
        assert torch.equal(columns, decoder.logits(hidden))
    cache = scorer.cache
    counts["KV"] = cache.bytes_per_block
    return counts


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", SPECS)
def test_a_step_costs_two_all_reduces_a_layer_and_one_whatever_its_rows(
    rank_pool: RankPool, family: str, size: int
) -> None:
    spec = replace(SPECS[family], num_layers=3)
    num_sums = spec.num_layers * (3 if spec.qk_norm == "full" else 2) + 1
    kv_bytes = 3 * 2 * spec.num_kv_heads * spec.head_dim * 4 * 4
    for counts in rank_pool.run(count_collectives, spec, size=size):
        assert counts == {
            "parameters": num_parameters_per_rank(spec, size),
            **{"many": num_sums, "one": num_sums, "many, logits": 1, "one, logits": 1},
            "KV": kv_bytes // min(size, spec.num_kv_heads),
        }


@pytest.mark.parametrize("numerics", [INVARIANT, SEGMENTS], ids=["one chain", "4 segments"])
def test_a_step_of_36_layers_costs_73(rank_pool: RankPool, numerics: Numerics) -> None:
    deep = replace(QWEN3, num_layers=36, hidden_size=8, head_dim=2, intermediate_size=8)
    counts = rank_pool.run(count_collectives, deep, size=2)
    assert [count["many"] for count in counts] == [73, 73]


SEGMENT_FAMILIES = ["qwen3", "llama with biases", "olmoe", "qwen3, 2 kv heads", "olmoe, 1 kv head"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", SEGMENT_FAMILIES)
def test_k_segments_make_1_2_and_4_ranks_agree_to_the_bit(rank_pool: RankPool, family: str, dtype: torch.dtype) -> None:
    spec = SPECS[family]
    whole = score(Decoder.random(spec, 1, numerics=SEGMENTS, dtype=dtype), texts())
    for size in (2, 4):
        for logits in rank_pool.run(score_random, spec, SEGMENTS, dtype, size=size):
            assert torch.equal(logits, whole), size
    # A control: without the segments the bits do differ, so there was something to agree about.
    chain = score(Decoder.random(spec, 1, numerics=INVARIANT, dtype=dtype), texts())
    assert not torch.equal(rank_pool.run(score_random, spec, INVARIANT, dtype, size=4)[0], chain)


@pytest.mark.parametrize("numerics", [INVARIANT, SEGMENTS], ids=["one chain", "4 segments"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["qwen3", "olmoe, 1 kv head"])
def test_a_rows_bits_are_its_own_on_every_rank(rank_pool: RankPool, family: str, size: int, numerics: Numerics) -> None:
    spec, second = SPECS[family], texts()[1]
    among = rank_pool.run(score_random, spec, numerics, torch.float32, size=size)[0]
    lengths = [max(1, len(text) - 4) for text in texts()]
    rows = list(range(lengths[0], lengths[0] + lengths[1]))
    # After the chunks every step holds a row of each text but the last, which has one token.
    rows += [sum(lengths) + 3 * step + 1 for step in range(4)]
    for alone in rank_pool.run(score_random, spec, numerics, torch.float32, True, size=size):
        assert alone.shape == (len(second), VOCAB)
        assert torch.equal(alone, among[rows])


def test_bf16_is_near_one_rank(rank_pool: RankPool) -> None:
    whole = score(Decoder.random(QWEN3, 1, numerics=INVARIANT, dtype=torch.bfloat16), texts())
    drift = {}
    for reduce_dtype in ("model", "float32"):
        sharded = rank_pool.run(score_random, QWEN3, Numerics(reduce_dtype=reduce_dtype), torch.bfloat16, size=4)
        assert all(torch.equal(logits, sharded[0]) for logits in sharded)
        drift[reduce_dtype] = (sharded[0] - whole).square().mean().sqrt().item()
    # On so small a model fp32 sums may round to the very numbers of one rank.
    assert drift["float32"] < drift["model"] < 0.02


def reduce_errors(group: RankGroup) -> list[float]:
    """Root mean square errors of a bf16 product over cut inputs, summed in bf16 and in fp32."""
    spec = replace(QWEN3, num_heads=64, num_kv_heads=4, num_layers=1)
    x = torch.randn(40, spec.q_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    errors = []
    for numerics in (INVARIANT, Numerics(reduce_dtype="float32")):
        output = (
            random_decoder(spec, 1, numerics=numerics, group=group, dtype=torch.bfloat16).layers[0].attention.output
        )
        exact = x.double() @ group.all_gather(output.weight, dim=1).double().T
        product = output(x.chunk(group.size, dim=1)[group.rank].contiguous())
        errors.append((product.double() - exact).square().mean().sqrt().item())
    return errors


def test_reducing_in_fp32_is_closer(rank_pool: RankPool) -> None:
    for narrow, wide in rank_pool.run(reduce_errors, size=4):
        assert wide < 0.7 * narrow


# Random weights


def hold_random(group: RankGroup, spec: ModelSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return local_tensors(random_decoder(spec, 3, numerics=INVARIANT, group=group, dtype=dtype))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("family", SPECS)
def test_random_weights_are_those_of_one_rank(rank_pool: RankPool, family: str, size: int) -> None:
    whole = Decoder.random(SPECS[family], 3, numerics=INVARIANT, dtype=torch.bfloat16).tensors()
    joined = join(SPECS[family], rank_pool.run(hold_random, SPECS[family], torch.bfloat16, size=size))
    assert joined.keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in joined.items())


# Refusals


def ask_for(group: RankGroup, token_id: int) -> torch.Tensor | None:
    decoder = random_decoder(QWEN3, 1, numerics=INVARIANT, group=group, dtype=torch.float64)
    before = group.num_collectives
    try:
        return Scorer(decoder, 1, 4).logits([[1, token_id]])
    except IndexError:
        assert group.num_collectives == before
        return None


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ids_of_the_whole_vocabulary_and_no_others(rank_pool: RankPool, size: int) -> None:
    for token_id in (-1, VOCAB, 4 * 25, 10**6):  # 99 pads the last rank's part, 100 is beyond it
        assert rank_pool.run(ask_for, token_id, size=size) == [None] * size
    for token_id in (0, 24, 25, 50, VOCAB - 1):
        results = rank_pool.run(ask_for, token_id, size=size)
        assert all(logits.isfinite().all() for logits in results)


def refusal(group: RankGroup, spec: ModelSpec, numerics: Numerics) -> str:
    with pytest.raises(ValueError, match="must") as caught:
        build_decoder(spec, numerics=numerics, group=group)
    return str(caught.value)


@pytest.mark.parametrize(
    ("spec", "numerics", "sentence"),
    [
        (replace(MISTRAL, intermediate_size=94), INVARIANT, "tp must divide intermediate_size 94, not 4"),
        (
            replace(OLMOE, num_heads=6, num_kv_heads=6, intermediate_size=46),
            INVARIANT,
            "tp must divide num_attention_heads 6, and divide or be a multiple of num_key_value_heads 6, "
            "and divide intermediate_size 46 (of each expert), not 4",
        ),
        (QWEN3, Numerics(k_segments=2), "k_segments must be a multiple of tp 4, not 2"),
        (
            replace(QWEN3, intermediate_size=100),
            Numerics(k_segments=8),
            "k_segments must divide intermediate_size 100, not 8",
        ),
    ],
)
def test_what_can_not_be_cut_is_refused(
    rank_pool: RankPool, spec: ModelSpec, numerics: Numerics, sentence: str
) -> None:
    assert rank_pool.run(refusal, spec, numerics, size=4) == [sentence] * 4


def test_one_rank_is_the_plain_decoder() -> None:
    decoder = build_decoder(QWEN3, numerics=INVARIANT)
    assert decoder.group is SINGLE
    assert decoder.local_spec is decoder.spec is QWEN3
    assert [type(module).__module__ for module in decoder.modules() if "parallel" in type(module).__module__] == []
    with pytest.raises(ValueError, match="k_segments must divide intermediate_size 96, not 64"):
        build_decoder(QWEN3, numerics=Numerics(k_segments=64))


def test_the_numerics_id_tells_ranks_apart_unless_their_bits_agree() -> None:
    def names(numerics: Numerics) -> list[str]:
        where: dict[str, Any] = {"dtype": torch.float32, "kv_dtype": torch.float32, "device": "cpu"}
        return [numerics.numerics_id(**where, tp=tp) for tp in (1, 2, 4)]

    assert len({*names(INVARIANT), *names(FAST), *names(Numerics(reduce_dtype="float32"))}) == 9
    assert len(set(names(Numerics(mode="fast", k_segments=4)))) == 3
    assert len(set(names(SEGMENTS))) == 1
    assert len({*names(SEGMENTS), *names(INVARIANT)}) == 4
    with pytest.raises(ValueError, match="reduce_dtype must be one of model, float32, not 'bf16'"):
        Numerics(reduce_dtype="bf16")


# References


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["qwen3", "olmoe"])
def test_greedy_tokens_equal_transformers(rank_pool: RankPool, tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = random_folder(family, tmp_path, vocab_size=VOCAB, num_attention_heads=8, num_key_value_heads=4)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in (3, 9, 1, 17, 6, 12)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    expected = []
    for prompt in prompts:
        made = model.generate(torch.tensor([prompt]), max_new_tokens=40, min_new_tokens=40, do_sample=False)
        expected.append(made[0, len(prompt) :].tolist())
    for size in (2, 4):
        assert rank_pool.run(greedy, folder, prompts, 40, size=size) == [expected] * size


def test_a_checkpoint_scores_as_on_one_rank(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = random_folder("mistral", tmp_path, vocab_size=VOCAB, tie_word_embeddings=True)
    whole = score_folder(SINGLE, folder, torch.float64)
    for logits in rank_pool.run(score_folder, folder, torch.float64, size=4):
        torch.testing.assert_close(logits, whole, atol=1e-12, rtol=0)
