"""``deterministic``: the same bits whatever was cached, whoever runs beside, whichever equal worker answers.

Cuts are every three windows here (2,048 tokens by default). What is compared is the state that a prefill hands over:
exit vector, window rows of all layers, open pairs and entries; then logits and tokens of the decoding.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from epdserve.model.batch import ForwardBatch, Outputs, Segment
from epdserve.model.replay import CanonicalCuts
from epdserve.services.engine.runner import Runner
from epdserve.services.types import PrefillResult
from support.draws import logits_of
from support.engine import (
    BLOCK_TOKENS,
    DecodeBench,
    PrefillBench,
    Reference,
    greedy,
    make_runner,
    prompt,
    settings,
)
from support.golden import tiny

CUT, WINDOW = 24, 8
PROMPT = prompt(77)  # cuts at 24, 48, 72
NEW = 19


def bench_of(**changes: object) -> PrefillBench:
    return PrefillBench(**{"deterministic_cut_tokens": CUT, **changes})  # type: ignore[arg-type]


def pair(**changes: object) -> DecodeBench:
    return DecodeBench(bench_of(), **{"deterministic_cut_tokens": CUT, **changes})  # type: ignore[arg-type]


@pytest.fixture
def bench() -> Iterator[PrefillBench]:
    bench = bench_of()
    yield bench
    bench.end_leases()
    bench.assert_nothing_leaked()


def state(bench: PrefillBench, result: PrefillResult) -> list[torch.Tensor]:
    """Everything decoding starts from: the tail's sections, and the global KV of the full blocks.

    What a page or a slot held before, where a tail says nothing, is blanked.
    """
    record, tokens = bench.runner.staging[result.handle.tail.slot], result.handle.tokens
    windows, pairs, open_block, *rest = (s.clone() for s in bench.runner.tail_layout.sections(record))
    for plane in bench.runner.layout.planes:
        used, end = tokens % BLOCK_TOKENS // plane.ratio, plane.entries_per_block
        for part in ("main_values", "main_scales", "index_values", "index_scales"):
            at, size = getattr(plane, f"{part}_offset"), getattr(plane, f"{part}_bytes")
            open_block[at + used * size : at + end * size] = 0
    if tokens % 2 == 0:
        pairs.zero_()
    pages = bench.runner.pools.pages[[ref.page for ref in result.handle.blocks]]
    return [windows, pairs, open_block, *rest, pages[:, : payload(bench.runner)]]


def payload(runner: Runner) -> int:
    return runner.layout.payload_bytes


def assert_same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for ours, theirs in zip(a, b, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def run(bench: PrefillBench, tokens: np.ndarray) -> PrefillResult:
    return bench.run(tokens, deterministic=True)


def cold(tokens: np.ndarray, **changes: object) -> list[torch.Tensor]:
    bench = bench_of(**changes)
    return state(bench, run(bench, tokens))


# -- what the cache held ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [23, 24, 25, 47, 48, 49, 73, 77, 96], ids=lambda n: f"T{n}")
def test_a_warm_cache_gives_the_bits_of_a_cold_one(bench: PrefillBench, length: int) -> None:
    """Prompts that end before, on and after cuts; the hit is every block before the last cut."""
    tokens = prompt(length)
    run(bench, tokens)
    warm = run(bench, tokens)
    assert warm.cached_tokens == (length - 1) // CUT * CUT
    assert_same_bits(state(bench, warm), cold(tokens))


@pytest.mark.parametrize("shared", [30, 47, 48, 50, 76])
def test_hits_end_at_cuts_and_leave_the_bits_alone(bench: PrefillBench, shared: int) -> None:
    """Another prompt left the blocks of its own pieces, the last of them unfinished."""
    run(bench, np.concatenate([PROMPT[:shared], prompt(40, 9)]))
    result = run(bench, PROMPT)
    assert (result.cached_tokens, result.sources.device) == (shared // CUT * CUT, shared // CUT * CUT)
    assert_same_bits(state(bench, result), cold(PROMPT))


def test_a_half_evicted_cache_gives_the_bits_of_a_cold_one() -> None:
    bench = bench_of(num_pages=14)  # the prompt takes ten
    run(bench, PROMPT)
    bench.end_leases()
    run(bench, prompt(60, 5))  # takes eight: some of the prompt's leaves go
    bench.end_leases()
    result = run(bench, PROMPT)
    assert 0 < result.cached_tokens < 72
    assert_same_bits(state(bench, result), cold(PROMPT))
    bench.end_leases()


def test_blocks_of_other_requests_are_not_hit(bench: PrefillBench) -> None:
    """Neither way: the same tokens have other names, since their bits may differ."""
    bench.run(PROMPT)
    assert run(bench, PROMPT).cached_tokens == 0
    assert run(bench, PROMPT).cached_tokens == 72


def test_without_it_the_warm_answer_differs(bench: PrefillBench) -> None:
    """Guards against a vacuous file: plain replay changes bits of the hand-over."""
    first = state(bench, bench.run(PROMPT))
    warm = bench.run(PROMPT)
    assert warm.cached_tokens == 72
    exit_RD = torch.stack([first[3].view(torch.float32), state(bench, warm)[3].view(torch.float32)])
    assert not torch.equal(*bench.runner.backbone.logits(exit_RD))


def test_replaying_something_else_at_a_cut_would_differ(bench: PrefillBench) -> None:
    """The same without the canonical pieces, cold: the cut itself is what makes the bits."""
    assert not torch.equal(cold(PROMPT)[3], state(bench, bench.run(PROMPT))[3])


# -- how steps were cut, who ran beside ------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [5, 24, 37])
def test_steps_of_any_length_give_the_same_bits(chunk: int) -> None:
    assert_same_bits(cold(PROMPT, chunk_tokens=chunk), cold(PROMPT, chunk_tokens=1000))


def test_prompts_beside_it_change_no_bit(bench: PrefillBench) -> None:
    tasks = [bench.submit(PROMPT, deterministic=True)]
    tasks += [bench.submit(prompt(n, n), deterministic=n % 2 == 0) for n in (5, 31, 60, 64)]
    while bench.worker.step():
        pass
    assert_same_bits(state(bench, tasks[0].done.result(timeout=0)), cold(PROMPT))


def test_the_pieces_are_what_the_definition_says(bench: PrefillBench) -> None:
    """By an independent path: segments laid out by hand, one for each piece."""
    reference = Reference(tiny("f32q"), 80)
    tokens = PROMPT.astype(np.int64)
    for start, end in ((0, 24), (24, 48), (48, 72), (72, 77)):
        first = max(0, start - WINDOW)
        floor = max(first, len(tokens) - WINDOW) if end == len(tokens) else end
        segment = Segment(
            tokens,
            first,
            end - first,
            reference.pages,
            0,
            encoder_floor=first,
            decoder_from=floor,
            decoder_floor=floor,
            publish_from=start,
            outputs=Outputs.LAST if end == len(tokens) else Outputs.NONE,
        )
        exit_RD = reference.backbone.forward(ForwardBatch.build([segment], reference.shape), reference.pools)
    ours = state(bench, run(bench, PROMPT))
    assert torch.equal(ours[3].view(torch.float32), exit_RD[0])
    assert torch.equal(ours[-1], reference.pools.pages[:9, : payload(bench.runner)])


# -- decoding --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wanted() -> tuple[list[int], list[torch.Tensor]]:
    """Tokens and logits of a cold pair of workers, alone."""
    bench = pair()
    seen = logits_of(bench)
    tokens = bench.generate(PROMPT, greedy(NEW), deterministic=True)
    bench.close()
    (logits,) = seen.values()
    assert len(logits) == NEW
    return tokens, logits


Wanted = tuple[list[int], list[torch.Tensor]]


def test_a_second_answer_is_the_first_bit_for_bit(wanted: Wanted) -> None:
    """Warm prefill and warm decode pages."""
    bench = pair()
    bench.generate(PROMPT, greedy(NEW), deterministic=True)
    seen = logits_of(bench)
    assert bench.generate(PROMPT, greedy(NEW), deterministic=True) == wanted[0]
    assert_same_bits(*seen.values(), wanted[1])
    bench.close()


def test_the_next_turn_is_as_if_nothing_had_been_cached(wanted: Wanted) -> None:
    """It repeats the answer, whose blocks decoding made: they are not shared, those of the prompt are."""
    turn = np.concatenate([PROMPT, np.array(wanted[0]), prompt(30, 3)])
    bench, fresh = pair(), pair()
    bench.generate(PROMPT, greedy(NEW), deterministic=True)
    hit = run(bench.prefill, turn)
    assert hit.cached_tokens == 72
    assert_same_bits(state(bench.prefill, hit), cold(turn))
    answer = bench.generate(turn, greedy(5), deterministic=True)
    assert answer == fresh.generate(turn, greedy(5), deterministic=True)
    for each in (bench, fresh):
        each.prefill.end_leases()
        each.close()


def test_requests_beside_it_change_no_bit(wanted: Wanted) -> None:
    bench = pair()
    job = bench.submit(PROMPT, greedy(NEW), deterministic=True)
    for length in (9, 33, 50):
        bench.submit(prompt(length, length), greedy(NEW + length % 4))
    bench.pump()
    assert bench.output(job) == wanted[0]
    bench.close()


@pytest.mark.parametrize("delivered", [1, 6, NEW - 1])
@pytest.mark.parametrize("handed", [True, False], ids=["prefilled-elsewhere", "computed-here"])
def test_a_resumed_answer_goes_on_bit_for_bit(wanted: Wanted, delivered: int, handed: bool) -> None:
    """After a death: the prompt is prefilled canonically, delivered tokens are run again."""
    bench = pair()
    seen = logits_of(bench)
    emitted = wanted[0][:delivered]
    more = {} if handed else {"handle": None}
    tokens = bench.generate(PROMPT, greedy(NEW), deterministic=True, emitted=emitted, **more)
    assert tokens == wanted[0][delivered:]
    assert_same_bits(*seen.values(), wanted[1][delivered:])
    bench.close()


def test_a_preempted_answer_goes_on_bit_for_bit(wanted: Wanted) -> None:
    """Full blocks of the answer are nobody else's, so it is computed again, in the same pieces."""
    bench = pair(num_pages=18)  # the two of them take 21 in the end
    other = bench.submit(prompt(40, 4), greedy(30))
    name = bench.submit(PROMPT, greedy(NEW), deterministic=True)
    bench.pump()
    receipt = bench.last(name).receipt
    assert receipt is not None
    assert receipt.preemptions > 0
    assert bench.output(name) == wanted[0]
    assert len(bench.output(other)) == 30
    bench.close()


def test_a_handle_of_other_rows_is_refused_and_computed_here(wanted: Wanted) -> None:
    """A router that had prompt and delivered tokens prefilled: those bits are not the first answer's."""
    bench = pair()
    emitted = wanted[0][:6]
    known = np.concatenate([PROMPT, np.array(emitted)])
    handle = run(bench.prefill, known).handle
    tokens = bench.generate(PROMPT, greedy(NEW), deterministic=True, emitted=emitted, handle=handle)
    assert (tokens, bench.handoffs()) == (wanted[0][6:], {"refused": 1})
    bench.close()


# -- names -----------------------------------------------------------------------------------------------------


def test_its_root_names_back_end_cuts_and_slack() -> None:
    roots = [
        make_runner(**{"deterministic_cut_tokens": 24, **changes}).deterministic_names.root
        for changes in ({}, {}, {"deterministic_cut_tokens": 32}, {"window_slack_tokens": 2})
    ]
    assert roots[0] == roots[1]
    assert len({*roots, make_runner().names.root}) == 4


def test_cuts_are_whole_blocks_and_longer_than_a_window() -> None:
    assert make_runner(deterministic_cut_tokens=3 * BLOCK_TOKENS + 1).cuts.every_tokens == 4 * BLOCK_TOKENS
    with pytest.raises(ValueError, match="within a window of 8"):
        make_runner(deterministic_cut_tokens=8)
    assert settings().deterministic_cut_tokens == 2048


def test_slack_keeps_more_rows_and_the_same_bits_warm() -> None:
    bench = bench_of(window_slack_tokens=6)
    first = state(bench, run(bench, PROMPT))
    assert_same_bits(state(bench, run(bench, PROMPT)), first)
    bench.end_leases()


def test_no_tail_is_kept(bench: PrefillBench) -> None:
    bench.run(PROMPT, deterministic=True, tail_at=76)
    assert not bench.shelf.tails


def test_it_does_not_go_together_with_exact() -> None:
    with pytest.raises(ValueError, match="halo"):
        bench_of().run(PROMPT, exact=True, deterministic=True)


def test_cuts_of_short_prompts() -> None:
    cuts = CanonicalCuts(24, 8)
    assert [cuts.last(n) for n in (1, 24, 25, 48, 49)] == [0, 0, 24, 24, 48]
    assert cuts.at_most(100, prompt_tokens=49) == 48
    assert cuts.span(0, prompt_tokens=24).end is None
    assert cuts.span(0, prompt_tokens=25).end == 24
