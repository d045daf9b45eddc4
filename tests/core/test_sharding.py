"""Checks how a model is cut over ranks: what is refused, and what one rank holds."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from paged.config.convert import conf_folder
from paged.core.model_spec import ModelSpec
from paged.core.sharding import (
    Part,
    check_k_segments,
    check_tp,
    local_parameter_shapes,
    local_part,
    local_spec,
    num_parameters_per_rank,
)

NORMS = 308_224  # parameters of Qwen3-8B that every rank holds


def named(model: str) -> ModelSpec:
    """A model of `conf/model`."""
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        cfg = compose("run", [f"model={model}"])
    return ModelSpec.from_config(OmegaConf.to_container(cfg.model.spec))


def test_qwen3_8b_has_the_parameters_of_the_formula() -> None:
    spec = named("qwen3_8b")
    assert spec.num_parameters() == 8_190_735_360
    assert spec.num_parameters() * 2 / 2**30 == pytest.approx(15.2564, abs=5e-5)
    for tp in (1, 2, 4, 8):
        assert num_parameters_per_rank(spec, tp) == (8_190_735_360 - NORMS) / tp + NORMS
    assert num_parameters_per_rank(spec, 4) == 2_047_915_008
    assert num_parameters_per_rank(spec, 4) * 2 == 4_095_830_016
    assert num_parameters_per_rank(spec, 2) * 2 == 8_191_043_584


def test_beyond_the_kv_heads_ranks_hold_copies() -> None:
    spec = named("qwen3_8b")
    shapes = local_parameter_shapes(spec, 32)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (128, 4096)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (128, 4096)
    assert shapes["model.layers.0.self_attn.k_norm.weight"] == (128,)
    assert num_parameters_per_rank(spec, 32) > (8_190_735_360 - NORMS) / 32 + NORMS


def test_a_vocabulary_is_padded_and_never_refused() -> None:
    spec = named("qwen3_8b")
    odd = ModelSpec.from_config({**CONFIG, "vocab_size": 99})
    assert local_parameter_shapes(odd, 4)["model.embed_tokens.weight"] == (25, 8)
    assert local_parameter_shapes(odd, 4)["lm_head.weight"] == (25, 8)
    assert local_spec(spec, 4).vocab_size * 4 == spec.vocab_size


CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": True,
}


def test_a_ranks_shapes_are_columns_rows_and_copies() -> None:
    spec = ModelSpec.from_config(CONFIG)
    layer = "model.layers.0."
    assert local_parameter_shapes(spec, 4) == {
        "model.embed_tokens.weight": (25, 8),
        layer + "input_layernorm.weight": (8,),
        layer + "self_attn.q_proj.weight": (4, 8),
        layer + "self_attn.q_proj.bias": (4,),
        layer + "self_attn.k_proj.weight": (4, 8),
        layer + "self_attn.k_proj.bias": (4,),
        layer + "self_attn.v_proj.weight": (4, 8),
        layer + "self_attn.v_proj.bias": (4,),
        layer + "self_attn.q_norm.weight": (4,),
        layer + "self_attn.k_norm.weight": (4,),
        layer + "self_attn.o_proj.weight": (8, 4),
        layer + "self_attn.o_proj.bias": (8,),
        layer + "post_attention_layernorm.weight": (8,),
        layer + "mlp.gate_proj.weight": (6, 8),
        layer + "mlp.up_proj.weight": (6, 8),
        layer + "mlp.down_proj.weight": (8, 6),
        "model.norm.weight": (8,),
        "lm_head.weight": (25, 8),
    }
    assert local_parameter_shapes(spec, 1) == spec.parameter_shapes()


def test_experts_are_cut_in_their_width_and_a_norm_over_all_heads_with_the_heads() -> None:
    spec = named("olmoe")
    shapes = local_parameter_shapes(spec, 4)
    assert shapes["model.layers.0.mlp.gate.weight"] == (64, 2048)
    assert shapes["model.layers.0.mlp.experts.63.up_proj.weight"] == (256, 2048)
    assert shapes["model.layers.0.mlp.experts.0.down_proj.weight"] == (2048, 256)
    assert shapes["model.layers.0.self_attn.q_norm.weight"] == (512,)
    assert shapes["model.layers.0.self_attn.k_norm.weight"] == (512,)
    assert sum(map(math.prod, shapes.values())) == num_parameters_per_rank(spec, 4)


@pytest.mark.parametrize("model", ["qwen3_8b", "qwen3_0_6b", "mistral7b", "olmoe", "llama3_8b"])
@pytest.mark.parametrize("tp", [1, 2, 4, 16])
def test_the_parts_of_all_ranks_are_the_tensors_and_have_the_local_shapes(model: str, tp: int) -> None:
    spec = named(model)
    local_shapes = local_parameter_shapes(spec, tp)
    for name, shape in spec.parameter_shapes().items():
        parts = [local_part(spec, name, rank, tp) for rank in range(tp)]
        if parts[0].dim is None:
            assert set(parts) == {Part()}
            assert local_shapes[name] == shape
            continue
        (dim,) = {part.dim for part in parts}
        covered = [range(part.start, part.stop) for part in parts]
        assert {len(places) for places in covered} == {local_shapes[name][dim]}
        assert local_shapes[name] == (*shape[:dim], len(covered[0]), *shape[dim + 1 :])
        # In the order of the ranks, each place once, or once for each copy.
        copies = max(1, tp // spec.num_kv_heads) if any(x in name for x in ("k_proj", "v_proj", "k_norm")) else 1
        assert [place for places in covered for place in places[:1]] == sorted(places[0] for places in covered)
        assert [covered[rank] for rank in range(tp)] == [covered[rank - rank % copies] for rank in range(tp)]
        assert sum(map(len, covered[::copies])) == shape[dim]


def test_the_parts_of_a_padded_vocabulary_end_with_it() -> None:
    odd = ModelSpec.from_config({**CONFIG, "vocab_size": 5})
    parts = [local_part(odd, "lm_head.weight", rank, 4) for rank in range(4)]
    assert parts == [Part(0, 0, 2), Part(0, 2, 4), Part(0, 4, 5), Part(0, 5, 5)]
    assert parts[2].index == (slice(4, 5),)
    assert local_part(odd, "model.layers.0.self_attn.o_proj.weight", 1, 4).index == (slice(None), slice(4, 8))
    assert local_part(odd, "model.norm.weight", 1, 4).index == (slice(None),)


def test_segments_must_suit_the_ranks_and_the_inner_sizes() -> None:
    spec = ModelSpec.from_config(CONFIG)  # o is 16 wide inside, down 24
    for tp, k_segments in ((1, 1), (4, 1), (1, 4), (2, 4), (4, 4), (4, 8), (1, 8)):
        check_k_segments(spec, tp, k_segments)
    for tp, k_segments, violated in (
        (4, 2, "be a multiple of tp 4"),
        (1, 16, "divide intermediate_size 24"),
        (4, 32, "divide num_attention_heads * head_dim 16, and divide intermediate_size 24"),
        (32, 16, "be a multiple of tp 32, and divide intermediate_size 24"),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (the whole sentence is compared below)
            check_k_segments(spec, tp, k_segments)
        assert str(caught.value) == f"k_segments must {violated}, not {k_segments}"
    check_k_segments(named("olmoe"), 4, 4)
    few = replace(named("olmoe"), num_kv_heads=1, head_dim=2, num_heads=16)
    with pytest.raises(ValueError, match=r"k_segments must divide num_key_value_heads \* head_dim 2, not 4$"):
        check_k_segments(few, 4, 4)


@pytest.mark.parametrize(
    ("tp", "sentence"),
    [
        (3, "tp must divide num_attention_heads 4, and divide or be a multiple of num_key_value_heads 2, not 3"),
        (
            5,
            "tp must divide num_attention_heads 4, and divide or be a multiple of num_key_value_heads 2, "
            "and divide intermediate_size 24, not 5",
        ),
        (8, "tp must divide num_attention_heads 4, not 8"),
        (0, "tp must be a whole number, at least 1, not 0"),
        (True, "tp must be a whole number, at least 1, not True"),
        (2.0, "tp must be a whole number, at least 1, not 2.0"),
    ],
)
def test_every_violated_divisibility_is_named(tp: int, sentence: str) -> None:
    spec = ModelSpec.from_config(CONFIG)
    for refuse in (check_tp, local_spec, local_parameter_shapes, num_parameters_per_rank):
        with pytest.raises(ValueError, match="^" + sentence.replace(".", r"\.") + "$"):
            refuse(spec, tp)


def test_the_width_of_experts_is_named_as_such() -> None:
    with pytest.raises(ValueError, match=r"divide intermediate_size 1024 \(of each expert\), not 3$"):
        check_tp(named("olmoe"), 3)


def test_allowed_numbers_of_ranks_are_those_of_the_rule() -> None:
    spec = named("goedel8b")

    def allowed(tp: int) -> bool:
        try:
            check_tp(spec, tp)
        except ValueError:
            return False
        return True

    assert [tp for tp in range(1, 65) if allowed(tp)] == [1, 2, 4, 8, 16, 32]


def test_the_embedded_model_can_be_cut() -> None:
    spec = ModelSpec.from_folder(Path(conf_folder()).parent / "paged" / "assets" / "tiny")
    check_tp(spec, 2)
