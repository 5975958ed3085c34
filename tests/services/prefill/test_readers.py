"""Several readers of one prefill, and the log-probabilities of its prompt."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from epdserve.kernels.sampling import top_log_probs
from epdserve.kvstore.lease import LeaseTable
from epdserve.kvstore.types import LeaseId
from epdserve.model.logits import LogitsPlan, LogitsRun
from epdserve.services.prefill.promise import Promise
from epdserve.services.types import PrefillJob, PrefillResult, token_ids
from support.engine import TENANT, PrefillBench, prompt
from support.golden import tiny
from support.manual_clock import ManualClock


@pytest.fixture
def bench() -> Iterator[PrefillBench]:
    bench = PrefillBench()
    yield bench
    bench.end_leases()
    bench.assert_nothing_leaked()


def run(bench: PrefillBench, tokens: np.ndarray, **options: object) -> PrefillResult:
    job = PrefillJob("r", token_ids(tokens), TENANT, exact=True, **options)  # type: ignore[arg-type]
    task = bench.worker.new_task(job)
    bench.worker.enqueue(task)
    while bench.worker.step():
        pass
    return task.done.result(timeout=0)


def pinned(bench: PrefillBench) -> int:
    return bench.runner.leaked_pages()


def test_every_reader_has_a_lease_of_its_own_on_the_same_pages(bench: PrefillBench) -> None:
    handles = run(bench, prompt(40), readers=3).handles
    assert len({handle.lease for handle in handles}) == 3
    assert len({(handle.blocks, handle.tail) for handle in handles}) == 1
    held = pinned(bench)
    assert held > 0
    for handle in (handles[1], handles[1], handles[0]):  # twice: a router may end what a worker has ended
        bench.leases.end(LeaseId(handle.lease))
        assert pinned(bench) == held
        assert bench.worker.leases_of("r")
    assert bench.leases.end(LeaseId(handles[2].lease))
    assert pinned(bench) == 0
    assert not bench.worker.leases_of("r")


def test_leases_that_nobody_ends_run_out() -> None:
    bench = PrefillBench(lease_ttl_s=5.0)
    handles = run(bench, prompt(20), readers=2).handles
    bench.leases.end(LeaseId(handles[0].lease))
    bench.clock.advance(5.0)
    assert not bench.leases.end(LeaseId(handles[1].lease))
    bench.assert_nothing_leaked()


def test_readers_may_end_at_the_same_moment() -> None:
    for _ in range(50):
        table, ends = LeaseTable(ManualClock()), []
        promise = Promise(table, readers=8, ttl_s=1.0, on_end=lambda ends=ends: ends.append(1))  # type: ignore[misc]
        threads = [threading.Thread(target=table.end, args=(lease,)) for lease in promise.leases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5)
        assert ends == [1]


@pytest.mark.parametrize(("length", "chunk_tokens"), [(2, 64), (13, 5), (70, 64)])
def test_prompt_logprobs_are_those_of_the_whole_model(length: int, chunk_tokens: int) -> None:
    bench = PrefillBench(chunk_tokens=chunk_tokens)
    tokens = prompt(length)
    told = run(bench, tokens, prompt_logprobs=4).prompt_logprobs
    assert told is not None
    logits = LogitsRun(tiny("f32q"), tokens, LogitsPlan()).run()[:-1]
    wanted = top_log_probs(logits, torch.from_numpy(tokens[1:]), top=4)
    for got, expected in zip((told.logprobs, told.top_ids, told.top_logprobs), wanted, strict=True):
        assert np.array_equal(got, expected.numpy())
    bench.end_leases()
    bench.assert_nothing_leaked()


def test_a_prompt_whose_tokens_are_told_takes_no_hit_and_fits_another_in_a_step(bench: PrefillBench) -> None:
    bench.run(prompt(40))
    first = run(bench, prompt(40), prompt_logprobs=0)
    assert first.cached_tokens == 0
    neighbour = bench.submit(prompt(30, 5))
    again = run(bench, prompt(40), prompt_logprobs=0)
    assert again.prompt_logprobs == first.prompt_logprobs
    assert again.prompt_logprobs is not None
    assert again.prompt_logprobs.top_ids.shape == (39, 0)
    assert neighbour.done.done()


def test_one_token_has_nothing_before_it(bench: PrefillBench) -> None:
    told = run(bench, prompt(1), prompt_logprobs=2).prompt_logprobs
    assert told is not None
    assert told.logprobs.shape == (0,)
