"""What a request asks of its draws: by the definition, whatever stands beside it, and after it was taken over."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from epdserve.kernels.sampling import log_probs
from epdserve.services.types import FinishReason, SamplingParams
from support.toy_decoding import ToyWorker, logits_after, table, task

PROMPT = [20, 30, 40, 30]
EVERYTHING = SamplingParams(
    seed=11,
    max_tokens=40,
    temperature=1.1,
    top_k=200,
    min_p=0.001,
    presence_penalty=0.7,
    frequency_penalty=0.4,
    repetition_penalty=1.2,
    logit_bias=((30, 3.0), (40, 2.5), (77, float("-inf")), (5000, 1.0)),
    min_tokens=30,
    ignore_eos=True,
    logprobs=3,
)


@pytest.fixture
def toy() -> Iterator[ToyWorker]:
    toy = ToyWorker()
    yield toy
    toy.close()


def greedy(max_tokens: int, **changes: object) -> SamplingParams:
    values = {"seed": 0, "temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens}
    return SamplingParams(**(values | changes))  # type: ignore[arg-type]


def penalized(params: SamplingParams, count: int) -> list[int]:
    """Greedy tokens under penalties, by the definition, one token at a time."""
    output: list[int] = []
    for _ in range(count):
        logits = table()[(PROMPT + output)[-1]].numpy().copy()
        for token in sorted({*PROMPT, *output}):
            value, factor = logits[token], np.float32(params.repetition_penalty)
            value = value / factor if value > 0 else value * factor
            if token in output:
                value -= np.float32(params.frequency_penalty) * np.float32(output.count(token))
                value -= np.float32(params.presence_penalty)
            logits[token] = value
        output.append(int(logits.argmax()))
    return output


@pytest.mark.parametrize(
    "penalties",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.8},
        {"repetition_penalty": 1.4},
        {"presence_penalty": -0.5, "frequency_penalty": 0.3, "repetition_penalty": 0.8},
    ],
)
def test_penalties_are_those_of_the_definition(toy: ToyWorker, penalties: dict[str, float]) -> None:
    params = greedy(60, **penalties)
    [output] = toy.run([task(PROMPT, params)])
    assert output == penalized(params, 60)
    assert output != toy.run([task(PROMPT, greedy(60))])[0]


def test_logprobs_are_the_models_whatever_was_asked_of_the_draw(toy: ToyWorker) -> None:
    one = task(PROMPT, EVERYTHING)
    [output] = toy.run([one])
    for token, logits, told in zip(output, logits_after(output, PROMPT), toy.told[one], strict=True):
        values = log_probs(torch.from_numpy(logits))
        best = values.topk(3)
        assert told.logprob == float(values[token])
        assert told.top == tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def test_each_request_is_told_what_it_asked_for(toy: ToyWorker) -> None:
    tasks = [task([n], greedy(3, logprobs=top)) for n, top in ((20, 0), (21, None), (22, 20))]
    toy.run(tasks)
    assert [len(told.top) for told in toy.told[tasks[0]]] == [0, 0, 0]
    assert tasks[1] not in toy.told
    assert [len(told.top) for told in toy.told[tasks[2]]] == [20, 20, 20]


def test_a_bias_pulls_and_minus_infinity_forbids(toy: ToyWorker) -> None:
    [free] = toy.run([task(PROMPT, greedy(30))])
    pulled, forbidden = toy.run(
        [
            task(PROMPT, greedy(3, logit_bias=((99, 1000.0),))),
            task(PROMPT, greedy(30, logit_bias=((free[0], float("-inf")), (10**6, 5.0)))),
        ]
    )
    assert pulled == [99, 99, 99]
    assert free[0] not in forbidden


def test_company_changes_nothing(toy: ToyWorker) -> None:
    params = [
        EVERYTHING,
        greedy(25),
        dataclasses.replace(EVERYTHING, seed=12, max_tokens=33),
        greedy(20, repetition_penalty=1.1),
        SamplingParams(seed=4, max_tokens=30, temperature=0.8, top_p=0.9, logprobs=1, ignore_eos=True),
    ]
    alone = [toy.run([task([20 + n, 30], each)])[0] for n, each in enumerate(params)]
    tasks = [task([20 + n, 30], each) for n, each in enumerate(params)]
    assert toy.run(tasks) == alone
    assert toy.run([task([20 + n, 30], each) for n, each in enumerate(params)][::-1]) == alone[::-1]
    whole = toy.told[tasks[0]]
    again = task([20, 30], params[0])
    toy.run([again])
    assert toy.told[again] == whole


@pytest.mark.parametrize("cut", [0, 1, 29, 39])
def test_a_request_taken_over_goes_on_as_if_nothing_had_happened(toy: ToyWorker, cut: int) -> None:
    first = task(PROMPT, EVERYTHING)
    [whole] = toy.run([first])
    second = task(PROMPT, EVERYTHING, emitted=whole[:cut])
    assert toy.run([second]) == [whole[cut:]]
    assert toy.told[second] == toy.told[first][cut:]


def test_stops_come_not_before_min_tokens(toy: ToyWorker) -> None:
    [free] = toy.run([task(PROMPT, greedy(30))])
    stop = free[4]
    at = free.index(stop)
    early, late = (
        task(PROMPT, greedy(30, stop_token_ids=(stop,), min_tokens=least)) for least in (0, at + 3)
    )
    outputs = toy.run([early, late])
    assert outputs[0] == free[: at + 1]
    assert toy.reasons[early] is FinishReason.STOP
    assert stop not in outputs[1][: at + 2]
    assert outputs[1][:at] == free[:at]


def test_where_wishes_leave_nothing_they_are_left_out(toy: ToyWorker) -> None:
    everything = tuple((token, float("-inf")) for token in range(512))
    assert toy.run([task(PROMPT, greedy(5, logit_bias=everything))]) == toy.run([task(PROMPT, greedy(5))])
