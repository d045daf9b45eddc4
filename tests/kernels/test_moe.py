"""The mixture of experts: who is chosen, what is rounded when, and rows that know nothing of their company."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paged.kernels import moe
from paged.kernels.moe import route, run_experts
from paged.kernels.numerics import Numerics

INVARIANT, FAST = Numerics(), Numerics(mode="fast")
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parts(dtype: torch.dtype, rows: int = 50, experts: int = 6, hidden: int = 512, inner: int = 64) -> Parts:
    """Rows, router, and the experts' two weights, of sizes that keep results near 1."""
    x, router = numbers(rows, hidden, dtype=dtype), numbers(experts, hidden, seed=1, dtype=dtype) * hidden**-0.5
    gate_up = numbers(experts, 2 * inner, hidden, seed=2, dtype=dtype) * hidden**-0.5
    return x, router, gate_up, numbers(experts, hidden, inner, seed=3, dtype=dtype) * inner**-0.5


def block(x: torch.Tensor, weights: Parts, numerics: Numerics = INVARIANT, k_segments: int = 1) -> torch.Tensor:
    logits = moe.linear(x, weights[1], numerics=numerics)
    experts, shares = route(logits, 3, normalize=True)
    return run_experts(x, experts, shares, *weights[2:], numerics=numerics, k_segments=k_segments)


def test_equals_are_chosen_by_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [0.0] * 5, [0.0, 1.0, 2.0, 3.0, 4.0]])
    experts, weights = route(logits, 2, normalize=False)
    assert experts.tolist() == [[1, 2], [0, 1], [3, 4]]
    assert weights[1].tolist() == pytest.approx([0.2, 0.2])
    assert weights[2, 0] < weights[2, 1], "slots are in order of ids, not of likelihood"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_experts", [3, 8, 60, 64])
def test_router_is_a_softmax_in_fp32_and_rows_know_no_neighbours(dtype: torch.dtype, num_experts: int) -> None:
    logits = 3 * numbers(41, num_experts, dtype=dtype)
    experts, weights = route(logits, 3, normalize=False)
    assert weights.dtype == dtype
    probs = logits.float().double().softmax(-1)
    assert (weights.double() - probs.gather(1, experts)).abs().max() < (1e-2 if dtype == torch.bfloat16 else 1e-6)
    assert torch.equal(weights.float().to(dtype), weights), "fp32 at most, in an fp64 model too"
    assert torch.equal(experts, probs.topk(3).indices.sort(-1).values)
    for normalize in (True, False):
        experts, weights = route(logits, 3, normalize=normalize)
        for first, count in ((0, 1), (40, 1), (3, 2), (5, 30)):
            part = route(logits[first : first + count].clone(), 3, normalize=normalize)
            assert torch.equal(part[0], experts[first : first + count])
            assert torch.equal(part[1], weights[first : first + count])


def test_normalized_weights_sum_to_one() -> None:
    logits = numbers(20, 8)
    plain, scaled = (route(logits, 4, normalize=normalize)[1] for normalize in (False, True))
    assert torch.allclose(scaled.sum(-1), torch.ones(20))
    assert torch.allclose(scaled, plain / plain.sum(-1, keepdim=True))
    assert (plain.sum(-1) < 0.99).all()


@pytest.mark.parametrize("numerics", [INVARIANT, FAST], ids=lambda n: n.mode)
@pytest.mark.parametrize("k_segments", [1, 4])
def test_against_every_expert_for_every_row(numerics: Numerics, k_segments: int) -> None:
    weights = parts(torch.float64)
    x, router, gate_up, down = weights
    probs = (x @ router.T).float().softmax(-1)
    chosen = torch.zeros_like(probs).scatter(1, probs.topk(3).indices, 1.0)
    shares = (probs * chosen / (probs * chosen).sum(-1, keepdim=True)).double()
    gates, ups = torch.einsum("tn,ein->tei", x, gate_up).chunk(2, -1)
    expected = torch.einsum("tei,eni,te->tn", F.silu(gates) * ups, down, shares)
    # The shares are fp32.
    assert (block(x, weights, numerics, k_segments) - expected).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k_segments", [1, 4])
def test_a_rows_bits_are_its_own(dtype: torch.dtype, k_segments: int) -> None:
    """Other engines computed an expert for all rows that chose it at once, in tiles chosen by their number."""
    weights = parts(dtype)
    x = weights[0]
    whole = block(x, weights, k_segments=k_segments)
    for first, count in ((0, 1), (5, 1), (49, 1), (0, 16), (3, 17), (7, 40)):
        assert torch.equal(
            block(x[first : first + count], weights, k_segments=k_segments), whole[first : first + count]
        )
    order = torch.randperm(50, generator=torch.Generator().manual_seed(3))
    assert torch.equal(block(x[order], weights, k_segments=k_segments), whole[order])
    # All rows at the same experts: 50 rows a tile chain, and then one.
    same = x[:1].expand(50, -1).contiguous()
    assert torch.equal(block(same, weights, k_segments=k_segments), whole[:1].expand(50, -1))


def test_the_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with one library call for all rows of an expert, cut in two where they are many, bits differ."""

    def planted(x: torch.Tensor, weight: torch.Tensor, **_: object) -> torch.Tensor:
        half = x.shape[1] // 2 if x.shape[0] > 4 else 0
        return F.linear(x[:, half:], weight[:, half:]) + F.linear(x[:, :half], weight[:, :half])

    weights = parts(torch.float32)
    monkeypatch.setattr(moe, "linear", planted)
    assert not torch.equal(block(weights[0][:1], weights), block(weights[0], weights)[:1])


def test_a_row_of_nans_stays_alone() -> None:
    weights = parts(torch.float32)
    x = weights[0].clone()
    x[7] = torch.nan
    out, clean = block(x, weights), block(weights[0], weights)
    assert out[7].isnan().all()
    assert torch.equal(out[8:], clean[8:])
    assert torch.equal(out[:7], clean[:7])


def test_launcher_checks() -> None:
    x, router, gate_up, down = parts(torch.float32, rows=4, hidden=16, inner=8)
    experts, shares = route(x @ router.T, 2, normalize=False)
    for bad in (
        (x.double(), gate_up, down),
        (x[:, :8], gate_up, down),
        (x, gate_up[:, :8], down),
        (x, gate_up[1:], down),
    ):
        with pytest.raises(AssertionError):
            run_experts(bad[0], experts, shares, *bad[1:], numerics=INVARIANT)
    for chosen in (0, 7):
        with pytest.raises(AssertionError):
            route(x @ router.T, chosen, normalize=False)


@pytest.mark.oracle
@pytest.mark.parametrize("normalize", [False, True])
def test_rounding_points_are_those_of_transformers(normalize: bool) -> None:
    """bf16, the block's loop over experts: nearly all elements are equal; summed in fp32, a third would differ."""
    from transformers import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

    x, router, gate_up, down = parts(torch.bfloat16, hidden=128)
    config = OlmoeConfig(
        hidden_size=128, intermediate_size=64, num_experts=6, num_experts_per_tok=3, norm_topk_prob=normalize
    )
    config._experts_implementation = "eager"
    theirs = OlmoeSparseMoeBlock(config).to(torch.bfloat16)
    with torch.no_grad():
        theirs.gate.weight.copy_(router)
        theirs.experts.gate_up_proj.copy_(gate_up)
        theirs.experts.down_proj.copy_(down)
        expected = theirs(x[None])[0]
    experts, shares = route(moe.linear(x, router, numerics=INVARIANT), 3, normalize=normalize)
    assert (run_experts(x, experts, shares, gate_up, down, numerics=INVARIANT) != expected).float().mean() < 0.01
    gates, ups = torch.einsum("tn,ein->tei", x.float(), gate_up.float()).chunk(2, -1)
    wide = torch.zeros(50, 6).scatter(1, experts, shares.float())
    once = torch.einsum("tei,eni,te->tn", F.silu(gates) * ups, down.float(), wide).bfloat16()
    assert (once != expected).float().mean() > 0.1
