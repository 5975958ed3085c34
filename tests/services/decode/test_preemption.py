from collections.abc import Iterator

import pytest
from epdserve.services.types import SamplingParams
from support.engine import DecodeBench, PrefillBench, greedy, greedy_reference, make_runner, prompt


@pytest.fixture
def bench() -> Iterator[DecodeBench]:
    bench = tight()
    yield bench
    bench.close()


LENGTHS = (12, 10, 5)
NEW_TOKENS = 13


def tight(**changes: int) -> DecodeBench:
    """Seven pages of four tokens; each of three requests needs five to seven of them in the end."""
    return DecodeBench(PrefillBench(block_tokens=4), block_tokens=4, num_pages=7, **changes)


def submit_many(bench: DecodeBench, *, exact: bool = False) -> dict[str, list[int]]:
    """Three requests, and what each must produce."""
    return {
        bench.submit(prompt(length, n), greedy(NEW_TOKENS), exact=exact): greedy_reference(
            prompt(length, n), NEW_TOKENS, exact=exact
        )
        for n, length in enumerate(LENGTHS)
    }


def test_preempted_requests_lose_nothing(bench: DecodeBench) -> None:
    wanted = submit_many(bench)
    bench.pump()
    assert {request_id: bench.output(request_id) for request_id in wanted} == wanted
    assert all([chunk.offset for chunk in bench.chunks[r]] == list(range(NEW_TOKENS)) for r in wanted)
    receipts = [bench.last(request_id).receipt for request_id in wanted]
    preemptions = [receipt.preemptions for receipt in receipts if receipt is not None]
    assert sum(preemptions) > 0
    assert preemptions[0] == 0  # the oldest is never preempted
    assert all(receipt is not None and receipt.recomputed_tokens == 0 for receipt in receipts)


def test_without_swap_memory_tokens_are_computed_again_and_are_the_same() -> None:
    bench = tight(swap_memory_bytes=0)
    # exact: otherwise the second computation may hit own blocks, and replay is no bitwise continuation
    wanted = submit_many(bench, exact=True)
    bench.pump()
    assert {request_id: bench.output(request_id) for request_id in wanted} == wanted
    receipts = [bench.last(request_id).receipt for request_id in wanted]
    assert any(receipt is not None and receipt.recomputed_tokens for receipt in receipts)
    bench.close()


def test_swap_memory_is_bounded() -> None:
    sizes = make_runner(block_tokens=4)
    one = 4 * sizes.layout.page_bytes + sizes.tail_layout.nbytes
    bench = tight(swap_memory_bytes=one)
    submit_many(bench)
    peak = 0

    def watch() -> bool:
        nonlocal peak
        peak = max(peak, bench.admission.swapped_bytes)
        return False

    bench.pump(until=watch)
    assert 0 < peak <= one
    bench.close()


def test_random_draws_survive_preemption(bench: DecodeBench) -> None:
    params = [SamplingParams(seed=n, max_tokens=12, temperature=1.0, ignore_eos=True) for n in range(2)]
    roomy = DecodeBench()
    alone = [roomy.generate(prompt(5, n), p) for n, p in enumerate(params)]
    roomy.close()
    ids = [bench.submit(prompt(5, n), p) for n, p in enumerate(params)]
    bench.pump()
    assert [bench.output(request_id) for request_id in ids] == alone
    assert sum(bench.last(request_id).receipt.preemptions for request_id in ids) > 0  # type: ignore[union-attr]


def test_preempted_request_can_be_cancelled(bench: DecodeBench) -> None:
    submit_many(bench)
    bench.pump(until=lambda: bench.admission.swapped_bytes > 0)
    for request_id in list(bench.worker._tasks):
        bench.worker.cancel(request_id)
    bench.pump()
    assert bench.worker.tasks == 0


def test_blocks_still_cached_are_not_copied_back(bench: DecodeBench) -> None:
    request_id = bench.submit(prompt(12), greedy(NEW_TOKENS))
    bench.pump(until=lambda: len(bench.chunks.get(request_id, [])) > 5)
    task = bench.worker._tasks[request_id]
    bench.admission._preempt(task)
    assert task.swapped is not None
    task.swapped.pages.zero_()  # never looked at: the pages are still there
    bench.pump()
    assert bench.output(request_id) == greedy_reference(prompt(12), NEW_TOKENS)


def test_restored_bytes_are_ours_when_the_name_stands_for_others(bench: DecodeBench) -> None:
    """A block evicted meanwhile and computed by a replay has another checksum; the request keeps its own bytes."""
    request_id = bench.submit(prompt(12), greedy(NEW_TOKENS))
    bench.pump(until=lambda: len(bench.chunks.get(request_id, [])) > 5)
    task = bench.worker._tasks[request_id]
    bench.admission._preempt(task)
    assert task.swapped is not None
    blocks = bench.runner.blocks
    blocks.abort(blocks.reserve(blocks.available()))  # evicts everything
    first = task.swapped.blocks[0]
    [page] = blocks.reserve(1)
    kept = blocks.seal(page, first.block_hash, parent=None, exact=True, checksum=first.checksum ^ 1)
    bench.pump()
    assert bench.output(request_id) == greedy_reference(prompt(12), NEW_TOKENS)
    assert task.request.private
    blocks.release([kept])


def test_request_that_cannot_grow_fails_when_nothing_can_be_moved(bench: DecodeBench) -> None:
    request_id = bench.submit(prompt(8), greedy(16))
    bench.pump(until=lambda: request_id in bench.chunks)
    blocks = bench.runner.blocks
    stuck = blocks.reserve(blocks.available())
    blocks.quarantine(stuck)
    bench.pump()
    error = bench.last(request_id).error
    assert error is not None
    assert error.code == "unavailable"
    blocks.transfer_over(stuck)
