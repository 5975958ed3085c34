"""Token draws in Triton's interpreter: the token is the reference's, whatever the filters."""

import pytest
import torch
from epdserve.kernels.launch import LaunchRefusedError
from epdserve.kernels.sampling.drafts import filtered_probs_ref
from epdserve.kernels.sampling.draw import filtered_probs, sample
from epdserve.kernels.sampling.reference import sample_ref
from support.kernel_rows import generator, randn
from support.triton_rows import assert_row_bits, assert_same_bits

FILTERS = {
    "none": (0, 1.0, 0.0),
    "top-k": (7, 1.0, 0.0),
    "one": (1, 1.0, 0.0),
    "top-p": (0, 0.8, 0.0),
    "nothing by top-p": (0, 0.0, 0.0),
    "min-p": (0, 1.0, 0.1),
    "min-p beyond 1": (0, 1.0, 1.5),
    "all": (20, 0.9, 0.02),
    "more than there are": (500, 0.999999, 1e-12),
}


def settings(rows: int, name: str, temperature: float = 0.8) -> tuple[torch.Tensor, ...]:
    top_k, top_p, min_p = FILTERS[name]
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
    )


def draws(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(-(2**62), 2**62, (rows,), generator=generator(5)), torch.arange(rows) * 31


@pytest.mark.parametrize("name", FILTERS)
def test_tokens_are_those_of_the_reference(name: str) -> None:
    logits = randn(2, 33) * 3
    logits[1] = logits[1].round()  # many ties
    arguments = (logits, *settings(2, name), *draws(2))
    assert torch.equal(sample(*arguments), sample_ref(*arguments))


@pytest.mark.parametrize("name", FILTERS)
def test_distributions_are_those_of_the_reference(name: str) -> None:
    logits = randn(2, 70) * 3
    logits[1] = logits[1].round()
    arguments = (logits, *settings(2, name))
    got, expected = filtered_probs(*arguments), filtered_probs_ref(*arguments)
    assert torch.equal(got > 0, expected > 0)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def test_a_row_of_temperature_zero_takes_its_best_token_the_lowest_on_ties() -> None:
    logits = torch.zeros(2, 1100)
    logits[0, [1030, 1060]] = 2.0
    arguments = (logits, *settings(2, "all", temperature=0.0))
    assert sample(*arguments, *draws(2)).tolist() == [1030, 0]
    assert_same_bits(filtered_probs(*arguments), filtered_probs_ref(*arguments))


def test_a_vocabulary_of_several_blocks() -> None:
    logits = randn(1, 1100) * 4
    for name in ("none", "all"):
        arguments = (logits, *settings(1, name), *draws(1))
        assert torch.equal(sample(*arguments), sample_ref(*arguments))


@pytest.mark.parametrize("name", ["none", "all"])
def test_what_is_forbidden_is_never_drawn_and_the_token_is_always_in_the_vocabulary(name: str) -> None:
    logits = torch.full((4, 40), float("-inf"))
    logits[0, 7] = 1.0
    logits[1, [3, 39]], logits[1, 5] = torch.tensor([2.0, 1.0]), float("nan")
    logits[2] = float("nan")
    got = sample(logits, *settings(4, name), *draws(4)).tolist()
    assert got[0] == 7
    assert got[1] in (3, 39)
    assert 0 <= got[2] < 40
    assert 0 <= got[3] < 40


def test_a_row_depends_on_itself_alone_and_rows_may_have_gaps() -> None:
    wide = randn(3, 50)[:, 20:]
    rows = (*settings(3, "top-k"), *draws(3))
    assert_row_bits(lambda logits, *rest: sample(logits, *(x.contiguous() for x in rest)), wide, *rows)
    assert torch.equal(sample(wide, *rows), sample(wide.contiguous(), *rows))


def test_a_vocabulary_of_one_and_no_row_are_legal() -> None:
    assert sample(torch.zeros(1, 1), *settings(1, "all"), *draws(1)).tolist() == [0]
    assert sample(torch.zeros(0, 9), *settings(0, "all"), *draws(0)).shape == (0,)


def test_bad_arguments_are_refused_with_their_value() -> None:
    with pytest.raises(LaunchRefusedError, match=r"got torch\.bfloat16"):
        sample(torch.zeros(1, 4).bfloat16(), *settings(1, "none"), *draws(1))
    with pytest.raises(LaunchRefusedError, match=r"got \(2,\)"):
        sample(torch.zeros(1, 4), *settings(2, "none"), *draws(1))
    with pytest.raises(LaunchRefusedError, match="vocabulary of 0"):
        sample(torch.zeros(1, 0), *settings(1, "none"), *draws(1))
