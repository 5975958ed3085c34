"""Routing and the plan of the experts in Triton's interpreter."""

import pytest
import torch
from epdserve.kernels.launch import LaunchRefusedError
from epdserve.kernels.moe import route_rows
from epdserve.kernels.moe.reference import route_ref
from epdserve.kernels.moe.route_rows import plan_experts, route
from support.kernel_rows import generator, randn
from support.triton_rows import assert_row_bits, assert_same_bits

EXPERTS, TOP = 12, 3


@pytest.mark.parametrize("experts", [TOP, 11, 16, 33])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_choices_and_weights_are_those_of_the_reference(tokens: int, experts: int) -> None:
    logits, bias = randn(tokens, experts) * 4, randn(experts, seed=1)
    chosen, weights = route(logits, bias, TOP, 1.5)
    expected, expected_weights = route_ref(logits, bias, TOP, 1.5)
    assert_same_bits(chosen, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=2e-6, atol=1e-12)


def test_logits_far_from_zero_and_a_bias_a_row() -> None:
    logits = torch.tensor([[-80.0, -20.0, -16.0, 90.0], [30.0, -1e-3, 0.0, 17.0]])
    bias = torch.tensor([[57.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 57.0]])
    chosen, weights = route(logits, bias, 4, 1.0)
    expected, expected_weights = route_ref(logits, bias, 4, 1.0)
    assert_same_bits(chosen, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=2e-6, atol=1e-30)


def test_equal_scores_go_to_the_lower_expert_and_a_row_of_nan_to_the_first() -> None:
    logits = torch.zeros(2, EXPERTS)
    logits[1] = float("nan")
    chosen, _ = route(logits, torch.zeros(EXPERTS), TOP, 1.0)
    assert chosen.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_a_row_depends_on_itself_alone() -> None:
    assert_row_bits(lambda x: route(x, randn(EXPERTS, seed=1), TOP, 1.5), randn(4, EXPERTS))


@pytest.mark.parametrize("tokens", [0, 1, 2, 13])
@pytest.mark.parametrize("rows", [1, 4])
def test_the_plan_is_a_stable_sort_cut_into_tiles(
    tokens: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route_rows, "_SCAN", 16)
    experts = torch.randint(0, EXPERTS, (tokens, TOP), generator=generator(3))
    experts = experts.where(experts != 5, 4)  # one expert gets nothing
    plan = plan_experts(experts, EXPERTS, rows)
    assert torch.equal(plan.order_P.long(), experts.flatten().sort(stable=True).indices)
    assert torch.equal(plan.place_P[plan.order_P.long()].long(), torch.arange(tokens * TOP))
    places = []
    for expert, first, count in plan.tiles.tolist():
        if expert >= 0:
            assert 0 < count <= rows
            assert bool((experts.flatten()[plan.order_P[first : first + count].long()] == expert).all())
            places += range(first, first + count)
    assert places == list(range(tokens * TOP))


def test_an_expert_out_of_range_has_no_place() -> None:
    plan = plan_experts(torch.tensor([[1, -1], [EXPERTS, 1]]), EXPERTS, 4)
    assert plan.place_P.tolist() == [0, -1, -1, 1]
    assert plan.tiles[0].tolist() == [1, 0, 2]


def test_bad_arguments_are_refused_with_their_value() -> None:
    with pytest.raises(LaunchRefusedError, match="cannot choose 5 of 4 experts"):
        route(torch.zeros(1, 4), torch.zeros(4), 5, 1.0)
    with pytest.raises(LaunchRefusedError, match=r"bias_E must have the shape \(4,\), got \(3,\)"):
        route(torch.zeros(1, 4), torch.zeros(3), 2, 1.0)
    with pytest.raises(LaunchRefusedError, match="cannot plan 5000 experts in tiles of 4 rows"):
        plan_experts(torch.zeros(1, 2, dtype=torch.int64), 5000, 4)
