import pytest
import torch
from epdserve.kernels.linear import linear
from epdserve.kernels.moe import route, swiglu
from support.kernel_rows import ROWS, assert_rows_independent, block, randn


def test_routing_is_the_golden_one() -> None:
    golden = block("router_expert")
    top_k, scaling = golden["params"].tolist()
    experts, weights = route(linear(golden["x"], golden["weight"]), golden["bias"], int(top_k), scaling)
    assert torch.equal(experts, golden["experts"].long())
    torch.testing.assert_close(weights, golden["weights"], atol=1e-6, rtol=0)


def test_an_expert_is_the_golden_one() -> None:
    golden = block("router_expert")
    gate, up = linear(golden["x"], golden["expert.w1"]), linear(golden["x"], golden["expert.w3"])
    inner = swiglu(gate, up, golden["expert.limit"].item()) * golden["expert.route_weight"]
    torch.testing.assert_close(linear(inner, golden["expert.w2"]), golden["expert.y"], atol=1e-6, rtol=0)


def test_weights_add_up_to_the_scaling_and_ignore_the_bias() -> None:
    logits = randn(20, 16)
    experts, weights = route(logits, torch.zeros(16), 4, 1.5)
    torch.testing.assert_close(weights.sum(1), torch.full((20,), 1.5))
    favoured, favoured_weights = route(logits, torch.full((16,), 57.0), 4, 1.5)
    assert torch.equal(favoured, experts)
    assert torch.equal(favoured_weights, weights)


def test_experts_come_in_descending_biased_score_and_ties_go_to_the_lower_index() -> None:
    logits = torch.zeros(1, 8)
    assert route(logits, torch.zeros(8), 3, 1.0)[0].tolist() == [[0, 1, 2]]
    bias = torch.tensor([0.0, 0.0, 2.0, 0.0, 0.0, 3.0, 0.0, 2.0])
    assert route(logits, bias, 4, 1.0)[0].tolist() == [[5, 2, 7, 0]]


def test_a_bias_per_row_is_taken_row_by_row() -> None:
    logits = randn(2, 8)
    bias = torch.stack((torch.zeros(8), randn(8, seed=1) * 50))
    experts, weights = route(logits, bias, 2, 1.0)
    for row in range(2):
        alone = route(logits[row : row + 1], bias[row], 2, 1.0)
        assert torch.equal(alone[0][0], experts[row])
        assert torch.equal(alone[1][0], weights[row])


@pytest.mark.parametrize("value", [-1e4, -88.0, -1e-3, 0.0, 1e-3, 20.0, 88.0, 1e4])
def test_affinities_of_any_logit_are_finite(value: float) -> None:
    logits = torch.tensor([[value, 0.0]])
    _, weights = route(logits, torch.zeros(2), 2, 1.0)
    affinity = torch.nn.functional.softplus(logits.double()).sqrt()
    expected = (affinity / affinity.sum()).sort(dim=1, descending=True).values
    torch.testing.assert_close(weights.double(), expected, atol=1e-6, rtol=1e-5)


def test_swiglu_clamps_the_gate_above_and_the_other_on_both_sides() -> None:
    gate = torch.tensor([100.0, 10.0, -100.0, -1.0, 0.0])
    up = torch.tensor([100.0, -100.0, 3.0, 0.5, 7.0])
    expected = torch.nn.functional.silu(torch.tensor([10.0, 10.0, -100.0, -1.0, 0.0])) * torch.tensor(
        [10.0, -10.0, 3.0, 0.5, 7.0]
    )
    torch.testing.assert_close(swiglu(gate, up, 10.0), expected)


def test_inputs_are_left_alone_and_none_is_legal() -> None:
    gate, up = randn(3, 8) * 20, randn(3, 8, seed=1) * 20
    before = gate.clone(), up.clone()
    swiglu(gate, up, 1.5)
    assert torch.equal(gate, before[0])
    assert torch.equal(up, before[1])
    assert swiglu(gate[:0], up[:0], 1.5).shape == (0, 8)
    assert route(torch.zeros(0, 8), torch.zeros(8), 2, 1.0)[0].shape == (0, 2)


@pytest.mark.parametrize("experts", [8, 33, 384])
def test_rows_are_independent(experts: int) -> None:
    bias = randn(experts, seed=1)
    assert_rows_independent(lambda logits: route(logits, bias, 6, 1.5), randn(ROWS, experts))


@pytest.mark.parametrize("channels", [32, 33, 576])
def test_swiglu_rows_are_independent(channels: int) -> None:
    assert_rows_independent(
        lambda a, b: swiglu(a, b, 1.5), randn(ROWS, channels), randn(ROWS, channels, seed=1)
    )
