from collections.abc import Iterator

import numpy as np
import pytest
from epdserve.services.errors import InvalidRequest, Overloaded
from epdserve.services.types import FinishReason, SamplingParams
from support.engine import DecodeBench, PrefillBench, Reference, greedy, greedy_reference, prompt
from support.golden import tiny


@pytest.fixture
def bench() -> Iterator[DecodeBench]:
    bench = DecodeBench()
    yield bench
    bench.close()


# window 8; 16 entries are chosen of those of 16 or 32 tokens; the candidate pool is 32 entries
@pytest.mark.parametrize("length", [1, 2, 5, 8, 15, 33, 70, 150])
def test_greedy_tokens_are_those_of_the_model_alone(bench: DecodeBench, length: int) -> None:
    assert bench.generate(prompt(length), greedy(8)) == greedy_reference(prompt(length), 8)
    assert bench.handoffs() == {"done": 1}


def test_exact_requests_are_those_of_the_model_alone(bench: DecodeBench) -> None:
    assert bench.generate(prompt(70), greedy(8), exact=True) == greedy_reference(prompt(70), 8, exact=True)


def test_many_requests_together_draw_what_each_draws_alone(bench: DecodeBench) -> None:
    wanted = {}
    for n, length in enumerate((3, 40, 9, 100, 17, 64)):
        wanted[bench.submit(prompt(length, n), greedy(4 + 3 * n))] = greedy_reference(
            prompt(length, n), 4 + 3 * n
        )
    bench.pump()
    assert {request_id: bench.output(request_id) for request_id in wanted} == wanted
    assert max(len(chunks) for chunks in bench.steps) == len(wanted)  # one publish a step, all requests in it


def test_mixed_sampling_draws_the_same_in_any_company(bench: DecodeBench) -> None:
    params = [
        SamplingParams(seed=5, max_tokens=5, temperature=0.9, ignore_eos=True),
        SamplingParams(seed=5, max_tokens=7, temperature=1.3, top_k=20, ignore_eos=True),
        SamplingParams(seed=-7, max_tokens=4, temperature=1.0, top_p=0.8, min_p=0.01, ignore_eos=True),
        greedy(6),
    ]
    # exact: a prefix hit of the second round would replay a window, and replay is no bitwise continuation
    alone = [bench.generate(prompt(30, n), p, exact=True) for n, p in enumerate(params)]
    ids = [bench.submit(prompt(30, n), p, exact=True) for n, p in enumerate(params)]
    bench.pump()
    assert [bench.output(request_id) for request_id in ids] == alone
    other_seed = SamplingParams(seed=6, max_tokens=5, temperature=0.9, ignore_eos=True)
    assert bench.generate(prompt(30, 0), other_seed, exact=True) != alone[0]


def test_prefix_hit_continues_as_the_replay_does(bench: DecodeBench) -> None:
    bench.generate(prompt(64), greedy(3))
    longer = np.concatenate([prompt(64), prompt(13, 3)])
    request_id = bench.submit(longer, greedy(9))
    bench.pump()
    reference = Reference(tiny("f32q"), 100)
    reference.prefill(prompt(64))
    assert bench.output(request_id) == reference.greedy(longer, 9, hit=64)
    receipt = bench.last(request_id).receipt
    assert receipt is not None
    assert (receipt.own_tokens, receipt.pulled_tokens, receipt.recomputed_tokens) == (64, 13, 0)
    assert (receipt.worker, receipt.steps) == ("decode-0", 9)


def test_generated_blocks_are_shared_too(bench: DecodeBench) -> None:
    tokens = bench.generate(prompt(20), greedy(30))
    whole = np.concatenate([prompt(20), tokens])
    hashes = bench.runner.names.chain(whole, b"tenant-a")
    assert bench.runner.blocks.peek(hashes) == 49 // 8  # the last token is never run


def test_request_ends_at_a_stop_token_and_not_before_min_tokens(bench: DecodeBench) -> None:
    free = greedy_reference(prompt(40), 12)
    stop = free[4]
    first = free.index(stop)
    request_id = bench.submit(prompt(40), greedy(12, stop_token_ids=(stop,)))
    bench.pump()
    assert bench.output(request_id) == free[: first + 1]
    assert bench.last(request_id).finish_reason is FinishReason.STOP
    request_id = bench.submit(prompt(40), greedy(12, stop_token_ids=(stop,), min_tokens=first + 3))
    bench.pump()
    output = bench.output(request_id)
    assert stop not in output[: first + 2]
    assert output[:first] == free[:first]


def test_eos_ends_a_request_unless_ignored(bench: DecodeBench) -> None:
    eos = tiny("f32q").config.eos_token_id
    ids = [
        bench.submit(prompt(12, n), SamplingParams(seed=n, max_tokens=5, temperature=50.0)) for n in range(4)
    ]
    bench.pump()
    for request_id in ids:
        tokens, last = bench.output(request_id), bench.last(request_id)
        ended = eos in tokens
        assert last.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert tokens.index(eos) == len(tokens) - 1 if ended else len(tokens) == 5


def test_output_ends_where_the_context_does() -> None:
    bench = DecodeBench(max_context_tokens=40)
    request_id = bench.submit(prompt(37), greedy(100))
    bench.pump()
    assert len(bench.output(request_id)) == 3
    assert bench.last(request_id).finish_reason is FinishReason.LENGTH
    with pytest.raises(InvalidRequest):
        bench.submit(prompt(40), greedy(1), handle=None)
    bench.close()


def test_resumed_request_goes_on_at_the_next_offset(bench: DecodeBench) -> None:
    free = greedy_reference(prompt(33), 12)
    request_id = bench.submit(prompt(33), greedy(12), emitted=free[:5])
    bench.pump()
    assert bench.chunks[request_id][0].offset == 5
    assert len(bench.output(request_id)) == 7


def test_request_resumed_without_a_handle_draws_what_the_first_worker_would_have(bench: DecodeBench) -> None:
    free = greedy_reference(prompt(33), 12)
    assert bench.generate(prompt(33), greedy(12), emitted=free[:5], handle=None) == free[5:]
    params = SamplingParams(seed=3, max_tokens=12, temperature=1.0, ignore_eos=True)
    drawn = bench.generate(prompt(33, 1), params)
    fresh = DecodeBench()
    assert fresh.generate(prompt(33, 1), params, emitted=drawn[:4], handle=None) == drawn[4:]
    fresh.close()


def test_request_resumed_after_its_last_token_just_ends(bench: DecodeBench) -> None:
    request_id = bench.submit(prompt(9), greedy(2), emitted=[5, 6], handle=None)
    assert bench.last(request_id).finish_reason is FinishReason.LENGTH
    assert bench.output(request_id) == []


def test_without_a_handle_the_prompt_is_computed_here(bench: DecodeBench) -> None:
    request_id = bench.submit(prompt(70), greedy(6), handle=None)
    bench.pump()
    assert bench.output(request_id) == greedy_reference(prompt(70), 6)
    receipt = bench.last(request_id).receipt
    assert receipt is not None
    assert (receipt.recomputed_tokens, receipt.pulled_tokens) == (70, 0)


def test_full_queue_ends_the_request_with_an_error() -> None:
    bench = DecodeBench(max_queued=1)
    ids = [bench.submit(prompt(9, n), greedy(3)) for n in range(3)]
    error = bench.last(ids[1]).error
    assert error is not None
    assert error.code == Overloaded.code
    bench.pump()
    assert len(bench.output(ids[0])) == 3
    bench.close()


def test_workers_share_no_pages_of_another_tenant(bench: DecodeBench) -> None:
    bench.generate(prompt(64), greedy(2))
    request_id = bench.submit(prompt(64), greedy(2), tenant_key=b"tenant-b", handle=None)
    bench.pump()
    receipt = bench.last(request_id).receipt
    assert receipt is not None
    assert receipt.own_tokens == 0


def test_prefill_and_decode_agree_on_the_block_size() -> None:
    bench = DecodeBench(PrefillBench(block_tokens=4))
    assert bench.generate(prompt(40), greedy(4)) == greedy_reference(prompt(40), 4)
    assert bench.handoffs() == {"refused": 1}
    bench.close()
