"""What can go wrong between prefill and decode, and that the tokens stay right and no page is lost."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.engine import DecodeBench, PrefillBench, eventually, greedy, greedy_reference, prompt


@pytest.fixture
def bench() -> Iterator[DecodeBench]:
    bench = DecodeBench(handoff_deadline_s=0.15)
    yield bench
    bench.close()


def assert_recomputed(bench: DecodeBench, request_id: str, length: int, outcome: str) -> None:
    assert bench.output(request_id) == greedy_reference(prompt(length), len(bench.output(request_id)))
    receipt = bench.last(request_id).receipt
    assert receipt is not None
    assert receipt.recomputed_tokens == length
    assert bench.handoffs() == {outcome: 1}


def test_recycled_pages_are_refused() -> None:
    """The lease ends and another prompt takes the pages while they are being read."""
    small = DecodeBench(PrefillBench(num_pages=9))
    recycled: list[bool] = []

    def recycle() -> None:
        if not recycled:
            recycled.append(True)
            small.leases.end_all()
            small.prefill.run(prompt(60, 9))

    small.fabric.before_copy = recycle
    request_id = small.submit(prompt(60), greedy(3))
    small.pump()
    assert recycled
    assert_recomputed(small, request_id, 60, "corrupt")
    small.prefill.end_leases()
    small.close()


def test_torn_block_is_refused(bench: DecodeBench) -> None:
    job = bench.job(prompt(60), greedy(3))
    assert job.handle is not None
    bench.prefill.runner.pools.pages[job.handle.blocks[3].page, 17] ^= 1
    bench.worker.enqueue(bench.worker.new_task(job))
    bench.pump()
    assert_recomputed(bench, job.request_id, 60, "corrupt")


def test_torn_header_is_refused(bench: DecodeBench) -> None:
    job = bench.job(prompt(60), greedy(3))
    assert job.handle is not None
    layout = bench.prefill.runner.layout
    bench.prefill.runner.pools.pages[job.handle.blocks[0].page, layout.header_offset + 9] ^= 1
    bench.worker.enqueue(bench.worker.new_task(job))
    bench.pump()
    assert_recomputed(bench, job.request_id, 60, "corrupt")


def test_torn_tail_is_refused(bench: DecodeBench) -> None:
    job = bench.job(prompt(61), greedy(3))
    assert job.handle is not None
    bench.prefill.runner.staging[job.handle.tail.slot, 5] ^= 1
    bench.worker.enqueue(bench.worker.new_task(job))
    bench.pump()
    assert_recomputed(bench, job.request_id, 61, "corrupt")


def test_expired_lease_is_not_trusted(bench: DecodeBench) -> None:
    job = bench.job(prompt(60), greedy(3))
    bench.clock.advance(100.0)
    bench.worker.enqueue(bench.worker.new_task(job))
    bench.pump()
    assert_recomputed(bench, job.request_id, 60, "lease_lost")


def test_other_incarnation_is_not_asked(bench: DecodeBench) -> None:
    bench.incarnations["prefill-0"] = "2"
    request_id = bench.submit(prompt(60), greedy(3))
    bench.pump()
    assert_recomputed(bench, request_id, 60, "no_peer")
    bench.prefill.end_leases()


def test_dead_peer_costs_a_recomputation(bench: DecodeBench) -> None:
    job = bench.job(prompt(60), greedy(3))
    bench.fabric.cut("prefill-0")
    bench.worker.enqueue(bench.worker.new_task(job))
    bench.pump()
    assert_recomputed(bench, job.request_id, 60, "failed")


def test_handle_for_other_tokens_is_refused(bench: DecodeBench) -> None:
    job = bench.job(prompt(60), greedy(3))
    for tokens in (prompt(60, 1), prompt(59)):
        bench.worker.enqueue(bench.worker.new_task(replace(job, request_id=f"x{len(tokens)}", tokens=tokens)))
    bench.pump()
    assert bench.handoffs() == {"refused": 2}
    assert bench.output("x59") == greedy_reference(prompt(59), 3)


@pytest.mark.parametrize("field", ["page", "slot"])
def test_handle_naming_places_that_do_not_exist_is_refused(bench: DecodeBench, field: str) -> None:
    job = bench.job(prompt(60), greedy(3))
    assert job.handle is not None
    if field == "page":
        blocks = (replace(job.handle.blocks[0], page=5000), *job.handle.blocks[1:])
        handle = replace(job.handle, blocks=blocks)
    else:
        handle = replace(job.handle, tail=replace(job.handle.tail, slot=5000))
    bench.worker.enqueue(bench.worker.new_task(replace(job, handle=handle)))
    bench.pump()
    assert_recomputed(bench, job.request_id, 60, "failed")


def test_hung_peer_costs_its_deadline_and_late_bytes_land_in_no_ones_pages(bench: DecodeBench) -> None:
    job = bench.job(prompt(60), greedy(3))
    bench.fabric.hold("prefill-0")
    bench.worker.enqueue(bench.worker.new_task(job))
    bench.pump()
    assert_recomputed(bench, job.request_id, 60, "late")
    quarantined = bench.runner.blocks.counts().quarantined
    assert quarantined == 7
    assert bench.runner.staging_slots.counts().quarantined == 1
    # everything that can be reserved is written to, then the late bytes come
    others = [bench.runner.blocks.reserve(bench.runner.blocks.available())]
    bench.runner.pools.pages[others[0]] = 0xAB
    bench.fabric.resume("prefill-0")
    eventually(lambda: bench.runner.blocks.counts().quarantined == 0)
    assert (bench.runner.pools.pages[others[0]] == 0xAB).all()
    bench.runner.blocks.abort(others[0])
    assert bench.runner.staging_slots.counts().quarantined == 0


def test_quarantine_ends_with_the_agent() -> None:
    bench = DecodeBench(handoff_deadline_s=0.1)
    job = bench.job(prompt(30), greedy(2))
    bench.fabric.hold("prefill-0")
    bench.worker.enqueue(bench.worker.new_task(job))
    bench.pump()
    assert bench.runner.blocks.counts().quarantined == 3
    bench.transfers.stop(timeout_s=5.0)
    assert bench.runner.blocks.counts().quarantined == 0
    bench.close()


@pytest.mark.parametrize("phase", ["waiting", "pulling", "running", "catching up"])
def test_cancel_frees_everything_in_every_phase(bench: DecodeBench, phase: str) -> None:
    if phase == "pulling":
        bench.fabric.hold("prefill-0")
    request_id = bench.submit(prompt(150), greedy(50), **({"handle": None} if phase == "catching up" else {}))
    if phase == "pulling":
        bench.worker.step()
        assert bench.admission.pulling == 1
    elif phase == "catching up":
        bench.worker.step()
        assert bench.runner.blocks.counts().filling
    elif phase == "running":
        bench.pump(until=lambda: request_id in bench.chunks)
    bench.worker.cancel(request_id)
    bench.worker.cancel(request_id)
    bench.fabric.resume("prefill-0")
    chunks = len(bench.chunks.get(request_id, []))
    bench.pump()
    eventually(lambda: bench.runner.blocks.counts().quarantined == 0)
    assert len(bench.chunks.get(request_id, [])) == chunks
    bench.settle_leases()
    assert bench.leases.counts().held == 0


def test_one_hung_peer_does_not_hold_up_other_requests() -> None:
    bench = DecodeBench(handoff_deadline_s=3.0)
    local = bench.submit(prompt(20, 1), greedy(4), handle=None)
    stuck = bench.job(prompt(60), greedy(3))
    bench.fabric.hold("prefill-0")
    bench.worker.enqueue(bench.worker.new_task(stuck))
    bench.pump(until=lambda: local in bench.chunks and bench.chunks[local][-1].final)
    assert bench.admission.pulling == 1
    bench.fabric.resume("prefill-0")
    bench.pump()
    assert bench.output(stuck.request_id) == greedy_reference(prompt(60), 3)
    bench.close()


def test_blocks_pulled_twice_are_kept_once(bench: DecodeBench) -> None:
    first, second = bench.job(prompt(64), greedy(3)), bench.job(prompt(64), greedy(3))
    for job in (first, second):
        bench.worker.enqueue(bench.worker.new_task(job))
    bench.pump()
    assert bench.output(first.request_id) == greedy_reference(prompt(64), 3)
    counts = bench.runner.blocks.counts()
    assert counts.cached == 8
