"""A greedy answer is the same bits alone, in any batch and in any chunking: logits of every draw are compared."""

import numpy as np
import pytest
import torch
from support.draws import logits_of
from support.engine import DecodeBench, PrefillBench, greedy, prompt

PROMPT, NEW = prompt(53), 14  # longer than window, top-k and candidate pool of the tiny model

Wanted = tuple[list[int], list[torch.Tensor]]


@pytest.fixture(scope="module")
def alone() -> Wanted:
    """A step for the whole prompt, then steps of one row."""
    bench = DecodeBench()
    logits = logits_of(bench)
    name = bench.submit(PROMPT, greedy(NEW))
    bench.pump()
    tokens = bench.output(name)
    bench.close()
    return tokens, logits[name]


def check(bench: DecodeBench, name: str, logits: dict[str, list[torch.Tensor]], alone: Wanted) -> None:
    assert bench.output(name) == alone[0]
    for ours, wanted in zip(logits[name], alone[1], strict=True):
        assert torch.equal(ours.view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize("mates", [1, 2, 6], ids=lambda n: f"B{n + 1}")
def test_in_any_batch(alone: Wanted, mates: int) -> None:
    """Mates of other lengths, before and after it, that come and end at other times."""
    bench = DecodeBench()
    logits = logits_of(bench)
    lengths = [9, 64, 30, 3, 17, 41][:mates]
    for seed, length in enumerate(lengths[::2]):
        bench.submit(prompt(length, seed + 1), greedy(NEW + 5 - 3 * seed))
    bench.pump(until=lambda: len(bench.steps) >= 3)
    name = bench.submit(PROMPT, greedy(NEW))
    for seed, length in enumerate(lengths[1::2]):
        bench.submit(prompt(length, seed + 11), greedy(4 + 9 * seed))
    bench.pump()
    check(bench, name, logits, alone)
    bench.close()


@pytest.mark.parametrize("chunk", [1, 6, 23])
def test_in_any_chunking_of_the_prompt(alone: Wanted, chunk: int) -> None:
    """Prefill steps of so many rows, shared with another prompt."""
    bench = DecodeBench(PrefillBench(chunk_tokens=chunk))
    logits = logits_of(bench)
    other = bench.prefill.submit(prompt(31, 2))
    name = bench.submit(PROMPT, greedy(NEW))
    bench.pump()
    check(bench, name, logits, alone)
    assert other.done.done()
    bench.prefill.end_leases()
    bench.close()


@pytest.mark.parametrize("chunk", [5, 64])
def test_computed_beside_decode_rows(alone: Wanted, chunk: int) -> None:
    """A decode worker runs the prompt in chunks beside the rows of those that decode."""
    bench = DecodeBench(chunk_tokens=chunk)
    logits = logits_of(bench)
    bench.submit(prompt(40, 3), greedy(30))
    bench.pump(until=lambda: len(bench.steps) >= 2)
    name = bench.submit(PROMPT, greedy(NEW), handle=None)
    bench.pump()
    check(bench, name, logits, alone)
    bench.close()


def test_a_resumed_answer_in_one_chunk(alone: Wanted) -> None:
    """Rows that were decoded one by one, run again side by side."""
    bench = DecodeBench()
    logits = logits_of(bench)
    name = bench.submit(PROMPT, greedy(NEW), handle=None, emitted=alone[0][:9])
    bench.pump()
    check(bench, name, logits, (alone[0][9:], alone[1][9:]))
    bench.close()


def test_the_comparison_can_fail(alone: Wanted) -> None:
    """One other token at the prompt's beginning, beyond every window: the logits are others."""
    bench = DecodeBench()
    logits = logits_of(bench)
    changed = np.concatenate([[11 if PROMPT[0] != 11 else 12], PROMPT[1:]])
    name = bench.submit(changed, greedy(NEW))
    bench.pump()
    assert not torch.equal(logits[name][0], alone[1][0])
    bench.close()
