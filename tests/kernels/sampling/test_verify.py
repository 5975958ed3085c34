"""Draft verification in Triton's interpreter: the reference's decisions."""

from typing import Any

import pytest
import torch
from epdserve.kernels.launch import LaunchRefusedError
from epdserve.kernels.sampling.drafts import Method, accept_greedy_ref, verify_drafts_ref
from epdserve.kernels.sampling.verify import accept_greedy, verify_drafts
from support.kernel_rows import generator, randn
from support.triton_rows import assert_row_bits

ROWS, DRAFTS = 10, 3


def case(vocabulary: int, rows: int = ROWS) -> dict[str, Any]:
    draft = torch.randint(0, vocabulary, (rows, DRAFTS), generator=generator(3))
    drafter = (randn(rows, DRAFTS, vocabulary, seed=2) * 0.7).softmax(2)
    return {
        "target_RKV": (randn(rows, DRAFTS + 1, vocabulary, seed=1) * 0.7).softmax(2),
        "drafter_RKV": drafter,
        "draft_RK": draft,
        "count_R": torch.arange(rows) % (DRAFTS + 1),
        "seed_R": torch.arange(rows) * 7919,
        "position_R": torch.arange(rows) + 100,
    }


@pytest.mark.parametrize("vocabulary", [3, 1030])
@pytest.mark.parametrize("greedy_drafter", [False, True])
@pytest.mark.parametrize("method", ["token", "block"])
def test_decisions_are_those_of_the_reference(method: Method, greedy_drafter: bool, vocabulary: int) -> None:
    arguments = case(vocabulary)
    if greedy_drafter:
        arguments["drafter_RKV"] = None
    got, expected = (verify(**arguments, method=method) for verify in (verify_drafts, verify_drafts_ref))
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    if vocabulary == 3:
        assert len(set(got[0].tolist())) > 1


def test_equal_distributions_accept_every_draft_that_counts() -> None:
    arguments = case(20)
    arguments["drafter_RKV"] = arguments["target_RKV"][:, :DRAFTS].contiguous()
    for method in ("token", "block"):
        accepted, _ = verify_drafts(**arguments, method=method)
        assert torch.equal(accepted, arguments["count_R"])


@pytest.mark.parametrize("method", ["token", "block"])
def test_a_request_depends_on_its_own_row_alone(method: Method) -> None:
    assert_row_bits(lambda *rows: verify_drafts(*rows, method=method), *case(20, rows=4).values())


@pytest.mark.parametrize("rows", [0, 1, 33])
def test_greedy_acceptance_is_that_of_the_reference(rows: int) -> None:
    best = torch.randint(0, 2, (rows, 4), generator=generator(1))
    draft = torch.randint(0, 2, (rows, 3), generator=generator(2))
    count = torch.arange(rows) % 4
    for got, expected in zip(
        accept_greedy(best, draft, count), accept_greedy_ref(best, draft, count), strict=True
    ):
        assert torch.equal(got, expected)


def test_bad_arguments_are_refused_with_their_value() -> None:
    def refused(message: str, **changed: Any) -> None:
        with pytest.raises(LaunchRefusedError, match=message):
            verify_drafts(**(case(5) | changed))

    refused("draft_RK holds 5, of 5", draft_RK=torch.full((ROWS, DRAFTS), 5))
    refused("count_R holds 4, of 4", count_R=torch.full((ROWS,), 4))
    refused("by guess", method="guess")
    refused(r"got torch\.float64", target_RKV=case(5)["target_RKV"].double())
    refused(r"got \(10, 3, 5\)", target_RKV=case(5)["target_RKV"][:, 1:])


def test_a_draft_that_was_not_looked_at_is_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epdserve.kernels.sampling.verify.check_indices", lambda *_, **__: None)
    arguments = case(5) | {"draft_RK": torch.full((ROWS, DRAFTS), 2**40), "count_R": torch.full((ROWS,), 99)}
    accepted, token = verify_drafts(**arguments)
    assert accepted.tolist() == [0] * ROWS
    assert bool(((token >= 0) & (token < 5)).all())
