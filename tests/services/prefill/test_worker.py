from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from epdserve.model.layers.block import Block, Residual
from epdserve.services.engine.preparing import Prepared
from epdserve.services.errors import Cancelled, InvalidRequest, Overloaded
from epdserve.services.schedule import Schedule
from epdserve.services.types import PrefillResult
from support.engine import BLOCK_TOKENS, PrefillBench, Reference, prompt
from support.golden import tiny


@pytest.fixture
def bench() -> Iterator[PrefillBench]:
    bench = PrefillBench()
    yield bench
    bench.end_leases()
    bench.assert_nothing_leaked()


def exit_vector(bench: PrefillBench, result: PrefillResult) -> torch.Tensor:
    record = bench.runner.staging[result.handle.tail.slot]
    return bench.runner.tail_layout.sections(record)[3].clone().view(torch.float32)


@pytest.mark.parametrize("length", [1, 5, 8, 9, 20, 64, 150])
def test_exit_vector_is_the_models_own(bench: PrefillBench, length: int) -> None:
    result = bench.run(prompt(length))
    expected = Reference(tiny("f32q"), length).prefill(prompt(length))
    assert torch.equal(exit_vector(bench, result), expected)
    assert len(result.handle.blocks) == length // BLOCK_TOKENS
    assert (result.cached_tokens, result.computed_tokens) == (0, length)


@pytest.mark.parametrize("chunk_tokens", [3, 64])
def test_bytes_do_not_depend_on_chunks_or_neighbours(chunk_tokens: int) -> None:
    alone = PrefillBench(chunk_tokens=256)
    expected = alone.run(
        prompt(71)
    ).handle  # odd: an even end leaves stale bytes where the open pairs would be
    bench = PrefillBench(chunk_tokens=chunk_tokens)
    tasks = [bench.submit(prompt(n, seed)) for seed, n in ((5, 50), (0, 71), (9, 3))]
    while bench.worker.step():
        pass
    handle = tasks[1].done.result(timeout=0).handle
    assert [b.checksum for b in handle.blocks] == [b.checksum for b in expected.blocks]
    assert [b.block_hash for b in handle.blocks] == [b.block_hash for b in expected.blocks]
    assert handle.tail.checksum == expected.tail.checksum


def test_short_prompt_passes_a_long_one() -> None:
    bench = PrefillBench(chunk_tokens=16, num_pages=64)
    long, short = bench.submit(prompt(300)), bench.submit(prompt(10, 1))
    for _ in range(2):
        bench.worker.step()
    assert short.done.done()
    assert not long.done.done()
    while bench.worker.step():
        pass
    bench.end_leases()
    bench.assert_nothing_leaked()


def test_second_prompt_hits_full_blocks_and_replays_a_window(bench: PrefillBench) -> None:
    bench.run(prompt(64))
    longer = np.concatenate([prompt(64), prompt(13, 3)])
    result = bench.run(longer)
    assert (result.cached_tokens, result.replayed_rows, result.computed_tokens) == (64, 8, 13)
    reference = Reference(tiny("f32q"), 80)
    reference.prefill(prompt(64))
    assert torch.equal(exit_vector(bench, result), reference.prefill(longer, hit=64))


def test_a_prompt_whose_blocks_come_up_holds_nobody_up_and_starts_at_the_first_missing_token(
    bench: PrefillBench,
) -> None:
    bench.run(prompt(64))  # what will have come up
    loading = bench.submit(np.concatenate([prompt(64), prompt(13, 3)]))
    loading.ready = False
    other = bench.submit(prompt(30, 7))
    while bench.worker.step():
        pass
    assert other.done.result(timeout=0).computed_tokens == 30
    assert not loading.done.done()
    bench.worker.prepared(loading, Prepared())
    while bench.worker.step():
        pass
    result = loading.done.result(timeout=0)
    assert (result.cached_tokens, result.computed_tokens) == (64, 13)


def test_full_hit_is_cut_back_by_a_block(bench: PrefillBench) -> None:
    first = bench.run(prompt(64))
    again = bench.run(prompt(64))
    assert again.cached_tokens == 56
    assert [b.page for b in again.handle.blocks] == [b.page for b in first.handle.blocks]


def test_hit_of_one_window_counts_as_none(bench: PrefillBench) -> None:
    bench.run(prompt(64))
    result = bench.run(np.concatenate([prompt(64)[:8], prompt(40, 2)]))
    assert result.cached_tokens == 0


def test_blocks_after_a_replay_are_tainted_and_exact_requests_replace_them(bench: PrefillBench) -> None:
    bench.run(prompt(64))
    longer = np.concatenate([prompt(64), prompt(24, 3)])
    replayed = bench.run(longer).handle
    assert [b.exact for b in replayed.blocks] == [True] * 8 + [False] * 3
    exact = bench.run(longer, exact=True)
    assert exact.cached_tokens == 64
    assert all(b.exact for b in exact.handle.blocks)
    bench.end_leases()
    assert bench.run(longer).cached_tokens == 80
    assert all(b.exact for b in bench.run(longer, exact=True).handle.blocks)


def test_tenants_share_nothing(bench: PrefillBench) -> None:
    bench.run(prompt(64))
    task = bench.submit(prompt(64), tenant=b"tenant-b")
    while bench.worker.step():
        pass
    assert task.done.result(timeout=0).cached_tokens == 0


def test_lease_keeps_pages_until_it_ends_or_expires() -> None:
    bench = PrefillBench(num_pages=8, lease_ttl_s=10.0)
    first = bench.run(prompt(60))
    waiting = bench.submit(prompt(60, 1))
    assert not bench.worker.step()  # no page can be had
    assert bench.leases.end(first.handle.lease)
    assert bench.worker.step()
    assert waiting.done.done()
    third = bench.submit(prompt(60, 2))
    bench.worker.step()
    assert not third.done.done()
    bench.clock.advance(10.0)
    assert bench.worker.step()
    assert not bench.leases.end(waiting.done.result().handle.lease)
    assert third.done.done()
    bench.end_leases()
    bench.assert_nothing_leaked()


def test_cancelled_prompts_free_everything_in_every_phase(bench: PrefillBench) -> None:
    running, waiting = bench.submit(prompt(200)), bench.submit(prompt(600, 1))
    bench.worker.step()
    assert running.request.pages
    for task in (running, waiting):
        bench.worker.cancel(task)
        assert isinstance(task.done.exception(timeout=0), Cancelled)
    assert bench.runner.leaked_pages() == 0
    assert bench.worker.idle


def test_a_step_ends_where_nobody_wants_it_any_more(
    bench: PrefillBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers: list[object] = []
    forward = Block.forward

    def leave_after_two(self: Block, *arguments: Any) -> Residual:
        layers.append(self)
        task.unwanted = len(layers) == 2
        return forward(self, *arguments)

    monkeypatch.setattr(Block, "forward", leave_after_two)
    task = bench.submit(prompt(60))
    assert bench.worker.step()
    assert len(layers) == 2
    assert not task.request.next_row
    bench.worker.cancel(task)
    bench.assert_nothing_leaked()
    monkeypatch.undo()
    fresh, other = bench.submit(prompt(60)), bench.submit(prompt(20, 1))
    fresh.unwanted = True
    assert bench.worker.step()
    assert fresh.request.next_row  # the other prompt of the step is wanted
    fresh.unwanted = False
    while bench.worker.step():
        pass
    assert fresh.done.result(timeout=0).computed_tokens == 60
    assert other.done.result(timeout=0)


def test_caller_that_went_away_gets_no_lease(bench: PrefillBench) -> None:
    task = bench.submit(prompt(20))
    assert task.done.cancel()
    bench.worker.step()
    assert bench.leases.counts().held == 0


def test_full_queue_refuses() -> None:
    bench = PrefillBench(max_queued=2)
    tasks = [bench.submit(prompt(30, n)) for n in range(3)]
    assert isinstance(tasks[2].done.exception(timeout=0), Overloaded)
    while bench.worker.step():
        pass
    assert all(task.done.result(timeout=0) for task in tasks[:2])


@pytest.mark.parametrize("tokens", [[], [5, 512], [5] * 800], ids=["empty", "unknown id", "too long"])
def test_impossible_prompts_are_refused(bench: PrefillBench, tokens: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        bench.submit(np.array(tokens, dtype=np.int64))


def test_staging_slots_bound_the_open_handles() -> None:
    bench = PrefillBench(staging_slots=8)
    tasks = [bench.submit(prompt(9, n)) for n in range(10)]
    while bench.worker.step():
        pass
    assert sum(task.done.done() for task in tasks) == 8
    bench.end_leases()
    while bench.worker.step():
        pass
    assert all(task.done.done() for task in tasks)
    bench.end_leases()
    bench.assert_nothing_leaked()


def test_priority_and_shares_of_tenants_order_the_queue() -> None:
    bench = PrefillBench(chunk_tokens=16, max_running=1)
    first = bench.submit(prompt(40))
    bench.worker.step()
    schedules = {
        "later": Schedule(),
        "greedy": Schedule(excess=9.0, priority=9),
        "first": Schedule(priority=3),
    }
    tasks = {
        name: bench.submit(prompt(20, number), schedule=schedule)
        for number, (name, schedule) in enumerate(schedules.items(), start=1)
    }
    ended = []
    while bench.worker.step():
        ended += [name for name, task in tasks.items() if task.done.done() and name not in ended]
    assert first.done.done()
    assert ended == ["first", "later", "greedy"]
    bench.end_leases()
    bench.assert_nothing_leaked()


def test_what_has_waited_four_targets_goes_first_whatever_its_priority() -> None:
    bench = PrefillBench(chunk_tokens=16, max_running=1)
    old = bench.submit(prompt(60), schedule=Schedule(target_s=0.5, waited_s=3.0, priority=-5))
    young = bench.submit(prompt(20, 1), schedule=Schedule(priority=5))
    while not (old.done.done() or young.done.done()):
        bench.worker.step()
    assert old.done.done()
    assert not young.done.done()
