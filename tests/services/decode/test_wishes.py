"""Grammars, choices and deadlines through the whole worker; what is drawn is in test_sampling and test_grammar."""

from collections.abc import Iterator

import numpy as np
import pytest
from epdserve.services.errors import DeadlineExceeded, InvalidRequest
from epdserve.services.grammar import formats
from epdserve.services.types import FinishReason, KVHandle, PrefillJob, SamplingParams, token_ids
from support.engine import TENANT, DecodeBench, PrefillBench, greedy, greedy_reference, prompt
from support.grammars import byte_text

ROWS = formats.regex("([a-f][0-9]){4}")


@pytest.fixture
def bench() -> Iterator[DecodeBench]:
    bench = DecodeBench()
    yield bench
    bench.close()


def warm(seed: int, **changes: object) -> SamplingParams:
    values: dict[str, object] = {"seed": seed, "max_tokens": 20, "temperature": 1.0}
    return SamplingParams(**(values | changes))  # type: ignore[arg-type]


def handles(bench: DecodeBench, tokens: np.ndarray, readers: int) -> tuple[KVHandle, ...]:
    job = PrefillJob("shared", token_ids(tokens), TENANT, exact=True, readers=readers)
    task = bench.prefill.worker.new_task(job)
    bench.prefill.worker.enqueue(task)
    while bench.prefill.worker.step():
        pass
    return task.done.result(timeout=0).handles


def test_a_batch_of_constrained_plain_and_impossible_requests(bench: DecodeBench) -> None:
    kept = bench.submit(prompt(9), warm(1, logprobs=1), grammar=ROWS)
    plain = bench.submit(prompt(9, 1), greedy(6))
    wrong = bench.submit(prompt(9, 2), warm(3), grammar=formats.regex("(a"))
    gone = bench.submit(prompt(9, 3), warm(4), grammar=formats.regex("[x-z]{9}"))
    bench.worker.cancel(gone)
    bench.pump()
    text = byte_text(bench.output(kept))
    assert len(text) == 8
    assert all(
        letter in "abcdef" and digit.isdigit() for letter, digit in zip(text[::2], text[1::2], strict=True)
    )
    assert bench.last(kept).finish_reason is FinishReason.STOP
    assert all(len(chunk.logprobs) == 1 for chunk in bench.chunks[kept])
    assert bench.output(plain) == greedy_reference(prompt(9, 1), 6)
    error = bench.last(wrong).error
    assert error is not None
    assert (error.code, error.param) == (InvalidRequest.code, "response_format")
    assert gone not in bench.chunks


@pytest.mark.parametrize("swap_memory_bytes", [2**26, 0], ids=["swapped", "computed again"])
def test_grammars_and_penalties_survive_preemption(swap_memory_bytes: int) -> None:
    rows, params = formats.regex("([a-f][0-9]){5}"), [warm(n, frequency_penalty=0.5) for n in range(2)]
    roomy = DecodeBench()
    ids = [roomy.submit(prompt(5, n), p, exact=True, grammar=rows) for n, p in enumerate(params)]
    roomy.pump()
    wanted = [roomy.output(request_id) for request_id in ids]
    roomy.close()
    tight = DecodeBench(
        PrefillBench(block_tokens=4), block_tokens=4, num_pages=6, swap_memory_bytes=swap_memory_bytes
    )
    ids = [tight.submit(prompt(5, n), p, exact=True, grammar=rows) for n, p in enumerate(params)]
    tight.pump()
    receipts = [tight.last(request_id).receipt for request_id in ids]
    assert sum(receipt.preemptions for receipt in receipts if receipt is not None) > 0
    assert [tight.output(request_id) for request_id in ids] == wanted
    tight.close()


def test_choices_of_one_prefill_are_those_of_requests_of_their_own(bench: DecodeBench) -> None:
    params = SamplingParams(seed=2**63 - 1, max_tokens=5, temperature=1.0, ignore_eos=True)
    alone = [bench.submit(prompt(33), params.for_choice(n), exact=True) for n in range(3)]
    bench.pump()
    wanted = [bench.output(request_id) for request_id in alone]
    assert len({tuple(tokens) for tokens in wanted}) == 3
    other = DecodeBench()
    shared = [
        other.submit(prompt(33), params.for_choice(n), exact=True, handle=handle)
        for n, handle in enumerate(handles(other, prompt(33), 3))
    ]
    other.pump()
    assert [other.output(request_id) for request_id in shared] == wanted
    assert other.handoffs() == {"done": 3}
    other.close()


def test_a_choice_that_is_cancelled_takes_nothing_from_the_others(bench: DecodeBench) -> None:
    first, second = handles(bench, prompt(33), 2)
    gone = bench.submit(prompt(33), greedy(3), exact=True, handle=first)
    other = bench.submit(prompt(33), greedy(3), exact=True, handle=second)
    bench.worker.cancel(gone)
    bench.pump()
    assert bench.output(other) == greedy_reference(prompt(33), 3, exact=True)


def test_a_request_ends_when_nobody_waits_any_more(bench: DecodeBench) -> None:
    late = bench.submit(prompt(9), greedy(500), timeout_s=5.0)
    other = bench.submit(prompt(9, 1), greedy(4), timeout_s=50.0)
    bench.pump(until=lambda: len(bench.chunks.get(late, ())) >= 2)
    bench.clock.advance(5.0)
    bench.pump()
    error = bench.last(late).error
    assert error is not None
    assert error.code == DeadlineExceeded.code
    assert len(bench.output(other)) == 4
