"""The hit rules (services/engine/README.md), a test each: what of a prompt is taken from the cache, at what cost."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from epdserve.services.types import PrefillResult, TokenSources
from support.engine import (
    BLOCK_TOKENS,
    DecodeBench,
    PrefillBench,
    Reference,
    greedy,
    greedy_reference,
    prompt,
)
from support.golden import tiny

WINDOW = 8  # of the tiny model; its halo is 84 rows


@pytest.fixture
def bench() -> Iterator[PrefillBench]:
    bench = PrefillBench()
    yield bench
    bench.end_leases()
    bench.assert_nothing_leaked()


def after(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


def exit_vector(bench: PrefillBench, result: PrefillResult) -> torch.Tensor:
    record = bench.runner.staging[result.handle.tail.slot]
    return bench.runner.tail_layout.sections(record)[3].clone().view(torch.float32)


def keep_tail(bench: PrefillBench, position: int, *, exact: bool = False) -> None:
    """As for a prompt whose last token is the thinking marker."""
    bench.run(prompt(position + 1), tail_at=position, exact=exact)
    bench.end_leases()


# -- where hits end -----------------------------------------------------------------------------------------


def test_hits_end_on_a_block_boundary(bench: PrefillBench) -> None:
    bench.run(prompt(61))  # seven blocks and five tokens
    assert bench.run(after(prompt(61), prompt(20, 1))).cached_tokens == 56


@pytest.mark.parametrize("position", [41, 47, 48, 56])
def test_or_at_a_tail(bench: PrefillBench, position: int) -> None:
    keep_tail(bench, position)
    result = bench.run(after(prompt(position), prompt(30, 1)), tail=bench.shelf.tails[position])
    assert (result.cached_tokens, result.replayed_rows, result.computed_tokens) == (position, 0, 30)
    assert result.sources == TokenSources(
        device=position - position % BLOCK_TOKENS, tail=position % BLOCK_TOKENS, computed=30
    )


def test_a_hit_of_at_most_one_window_without_a_tail_counts_as_none(bench: PrefillBench) -> None:
    bench.run(prompt(60))
    result = bench.run(after(prompt(WINDOW), prompt(30, 1)))
    assert (result.cached_tokens, result.replayed_rows) == (0, 0)


def test_with_a_tail_it_counts(bench: PrefillBench) -> None:
    keep_tail(bench, 5)
    result = bench.run(after(prompt(5), prompt(30, 1)), tail=bench.shelf.tails[5])
    assert result.cached_tokens == 5


@pytest.mark.parametrize("length", [56, 64])
def test_at_least_one_token_is_always_computed(bench: PrefillBench, length: int) -> None:
    bench.run(prompt(64))
    result = bench.run(prompt(length))
    assert result.cached_tokens == length - BLOCK_TOKENS
    assert result.computed_tokens == BLOCK_TOKENS


def test_a_full_hit_gets_its_logits_from_rows_that_are_run(bench: PrefillBench) -> None:
    bench.run(prompt(64))
    reference = Reference(tiny("f32q"), 64)
    reference.prefill(prompt(64))
    assert torch.equal(exit_vector(bench, bench.run(prompt(64))), reference.prefill(prompt(64), hit=56))


def test_cached_tokens_is_the_hit_and_replayed_rows_are_told_apart(bench: PrefillBench) -> None:
    bench.run(prompt(60))
    result = bench.run(after(prompt(60), prompt(11, 1)))
    assert (result.cached_tokens, result.replayed_rows, result.computed_tokens) == (56, WINDOW, 15)
    assert result.sources == TokenSources(device=56, computed=15)


# -- which tail, and when ------------------------------------------------------------------------------------


def test_a_tail_resumes_with_the_bits_of_the_uninterrupted_run(bench: PrefillBench) -> None:
    """Exact, so that a cold run of the whole prompt has the same bits in every row."""
    keep_tail(bench, 61, exact=True)
    longer = after(prompt(61), prompt(40, 1))
    result = bench.run(longer, tail=bench.shelf.tails[61], exact=True)
    assert result.cached_tokens == 61
    assert torch.equal(exit_vector(bench, result), Reference(tiny("f32q"), 101).prefill(longer, exact=True))


def test_the_answer_after_a_tail_is_the_one_of_the_uninterrupted_run() -> None:
    """The tail that decoding leaves; the next turn begins with all of the last one."""
    bench = DecodeBench()
    tokens = bench.generate(prompt(45), greedy(9), exact=True)
    end = 45 + 9 - 1  # the token drawn last was not run
    turn = after(prompt(45), np.array(tokens), prompt(12, 1))
    # the store would bring the decoded blocks up
    prefill = bench.prefill
    prefill.run(turn[:48], exact=True)
    tail = bench.shelf.tails[end]
    assert tail.exact
    result = prefill.run(turn, tail=tail, exact=True)
    assert (result.cached_tokens, result.sources.tail) == (end, end % BLOCK_TOKENS)
    job = replace(bench.job(turn, greedy(6), handle=result.handle, exact=True), request_id="next")
    bench.worker.enqueue(bench.worker.new_task(job))
    bench.pump()
    assert bench.output("next") == greedy_reference(turn, 6, exact=True)
    prefill.end_leases()
    bench.close()


def test_a_tail_without_its_blocks_is_of_no_use(bench: PrefillBench) -> None:
    keep_tail(bench, 61)
    other = PrefillBench()
    other.run(prompt(30))
    result = other.run(after(prompt(61), prompt(30, 1)), tail=bench.shelf.tails[61])
    assert (result.cached_tokens, result.replayed_rows) == (24, WINDOW)


def test_a_tail_that_saves_no_row_is_left_alone(bench: PrefillBench) -> None:
    bench.run(prompt(80))
    keep_tail(bench, 45)
    result = bench.run(prompt(80), tail=bench.shelf.tails[45])
    assert (result.cached_tokens, result.replayed_rows) == (72, WINDOW)


def test_a_tail_within_the_window_before_a_hit_saves_its_replay(bench: PrefillBench) -> None:
    bench.run(prompt(80))
    keep_tail(bench, 67)
    result = bench.run(after(prompt(72), prompt(20, 1)), tail=bench.shelf.tails[67])
    assert (result.cached_tokens, result.replayed_rows) == (67, 0)


@pytest.mark.parametrize("place", [3, -4000], ids=["windows", "header"])
def test_a_tail_that_is_not_what_was_promised_is_refused(bench: PrefillBench, place: int) -> None:
    keep_tail(bench, 61)
    tail = bench.shelf.tails[61]
    tail.record_B[place] ^= 1
    result = bench.run(after(prompt(61), prompt(30, 1)), tail=tail)
    assert (result.cached_tokens, result.replayed_rows) == (56, WINDOW)


def test_a_tail_of_another_tenant_or_text_is_refused(bench: PrefillBench) -> None:
    keep_tail(bench, 61)
    longer = after(prompt(60), prompt(30, 1))
    assert bench.run(longer, tail=bench.shelf.tails[61]).cached_tokens == 56
    bench.end_leases()
    task = bench.submit(after(prompt(61), prompt(9, 1)), tenant=b"tenant-b", tail=bench.shelf.tails[61])
    while bench.worker.step():
        pass
    assert task.done.result(timeout=0).cached_tokens == 0


# -- exactness -----------------------------------------------------------------------------------------------


def test_exact_requests_resume_at_a_bare_boundary_by_running_a_halo(bench: PrefillBench) -> None:
    bench.run(prompt(160))
    longer = after(prompt(160), prompt(40, 1))
    result = bench.run(longer, exact=True)
    assert (result.cached_tokens, result.replayed_rows) == (
        160,
        45,
    )  # 84 rows and one before the prompt's end
    assert all(block.exact for block in result.handle.blocks)
    assert torch.equal(exit_vector(bench, result), Reference(tiny("f32q"), 200).prefill(longer, exact=True))


def test_an_exact_hit_of_at_most_a_halo_counts_as_none(bench: PrefillBench) -> None:
    bench.run(prompt(64))
    assert bench.run(after(prompt(40), prompt(200, 1)), exact=True).cached_tokens == 0
    assert bench.run(prompt(80), exact=True).cached_tokens == 0


def test_exact_requests_take_no_tainted_tail(bench: PrefillBench) -> None:
    bench.run(prompt(40))
    bench.run(after(prompt(40), prompt(38, 1)), tail_at=77)
    tail = bench.shelf.tails[77]
    assert not tail.exact
    longer = after(prompt(40), prompt(38, 1)[:37], prompt(20, 2))
    assert bench.run(longer, tail=tail).cached_tokens == 77
    assert bench.run(longer, tail=tail, exact=True).cached_tokens == 0


def test_what_follows_a_tail_is_exact_if_all_before_it_is(bench: PrefillBench) -> None:
    keep_tail(bench, 61)
    assert bench.shelf.tails[61].exact
    result = bench.run(after(prompt(61), prompt(30, 1)), tail=bench.shelf.tails[61])
    assert [block.exact for block in result.handle.blocks] == [True] * 11
    assert result.handle.tail.exact


def test_what_follows_a_tainted_tail_is_tainted(bench: PrefillBench) -> None:
    bench.run(prompt(40))
    bench.run(after(prompt(40), prompt(38, 1)), tail_at=77)
    result = bench.run(after(prompt(40), prompt(38, 1)[:37], prompt(20, 2)), tail=bench.shelf.tails[77])
    assert [block.exact for block in result.handle.blocks] == [True] * 5 + [False] * 7
    assert not result.handle.tail.exact


# -- which tails are kept ------------------------------------------------------------------------------------


def test_a_tail_is_kept_before_the_end_without_changing_what_follows(bench: PrefillBench) -> None:
    result = bench.run(prompt(70), tail_at=69)
    assert set(bench.shelf.tails) == {69}
    assert torch.equal(exit_vector(bench, result), Reference(tiny("f32q"), 70).prefill(prompt(70)))


@pytest.mark.parametrize(("slack", "kept"), [(0, {69}), (1, {68}), (4, {65})])
def test_the_slack_says_how_far_before_the_end_a_tail_may_be(slack: int, kept: set[int]) -> None:
    bench = PrefillBench(window_slack_tokens=slack)
    for position in range(60, 70):
        bench.run(prompt(70, position), tail_at=position)
        bench.end_leases()
    assert min(bench.shelf.tails) == min(kept)
    bench.assert_nothing_leaked()


def test_short_prompts_drop_no_row_and_keep_a_tail_anywhere(bench: PrefillBench) -> None:
    bench.run(prompt(8), tail_at=2)
    assert set(bench.shelf.tails) == {2}


def test_no_tail_is_kept_inside_a_hit(bench: PrefillBench) -> None:
    bench.run(prompt(64))
    bench.run(prompt(64), tail_at=20)
    assert not bench.shelf.tails


def test_hits_are_told_to_the_store(bench: PrefillBench) -> None:
    bench.run(prompt(64))
    bench.run(after(prompt(64), prompt(9, 1)))
    assert [len(hashes) for hashes in bench.shelf.touched] == [0, 8]
