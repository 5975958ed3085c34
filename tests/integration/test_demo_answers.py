"""The trained demo model answers through the real pools: the bars of ``model/demo/README.md``, with slack."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from epdserve.model.demo.shipped import TRAINED_FILE
from epdserve.model.demo.training import efforts, newcomer
from epdserve.model.demo.training.cases import Cases
from epdserve.model.demo.training.served import share_right
from epdserve.model.demo.training.vocabulary import Vocabulary
from epdserve.model.demo.writer import write_trained_model
from support.stack import Stack, running_stack
from support.vision import encoded, picture

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not TRAINED_FILE.exists(), reason="no trained weights"),
]

# Measured with 30 cases through the pools: greet, copy, tool and recall-512 1.00, result 0.97, json and words 0.93,
# passage 0.87. Below by what twenty cases may fall short by chance, and far above what is left when rows lose entries
FLOORS = {
    "greet": 0.85,
    "copy": 0.85,
    "copy-200": 0.8,
    "recall-512": 0.85,
    "tool": 0.85,
    "result": 0.8,
    "json": 0.75,
    "words": 0.75,
    "passage": 0.65,
}
COUNT = 20
FACTS = "The code of Vikin is river. The code of Balis is lamp. The code of Sesan is cloud."


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("answers")
    model_dir = write_trained_model(folder / "model")
    config = folder / "epdserve.toml"
    config.write_text("[machine]\nencode_workers = 1\n")
    arguments = ("--port", "0", "--model", str(model_dir), "--config", str(config))
    with running_stack(folder / "state", *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def cases() -> Cases:
    return Cases(Vocabulary())


@pytest.mark.parametrize("name", FLOORS)
def test_answers_are_right(stack: Stack, cases: Cases, name: str) -> None:
    right, count = share_right(stack.base_url, stack.model, cases, name, COUNT)
    assert right / count >= FLOORS[name], f"{right} of {count} right"
    stack.assert_conserved()


def test_a_hit_that_ends_on_the_asked_value_loses_nothing(stack: Stack, cases: Cases) -> None:
    """A server that rewrote replayed entries would answer none of these (``model/demo/README.md``, the sharp test).

    They are answered in one word, so by the worker that replays: another one may have pages of its own.
    """
    right = 0
    for number in range(12):
        case = cases.draw("snip-256", number)
        _complete(
            stack, [*case.prompt[: case.cut], *case.prompt[1:9]], 1
        )  # leaves these blocks, and no tail here
        answer = _complete(stack, case.prompt, len(case.answer) + 4)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == case.cut
        right += answer["choices"][0]["text"] == cases.text(case.answer[:-1])
    assert right >= 10, f"{right} of 12"


def _complete(stack: Stack, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    body = {"model": stack.model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
    answer: dict[str, Any] = stack.http.post("/v1/completions", json=body).json()
    return answer


@pytest.mark.parametrize("said", newcomer.TEN, ids=[said.text[-24:] for said in newcomer.TEN])
def test_what_a_newcomer_types_is_answered_as_the_card_says(stack: Stack, said: newcomer.Said) -> None:
    told = newcomer.answer(stack.base_url, stack.model, said, thinking={"type": "disabled"})
    assert told == said.answer


def test_answers_after_the_most_thought_are_right(stack: Stack) -> None:
    with ThreadPoolExecutor(4) as threads:
        thoughts = list(
            threads.map(lambda number: efforts.think(stack.base_url, stack.model, number, 100), range(12))
        )
    assert sum(thought.right for thought in thoughts) >= 8
    assert min(thought.reasoning_tokens for thought in thoughts) >= 40


def test_a_greeting_after_little_thought(stack: Stack) -> None:
    answer = stack.chat("Hello", max_tokens=200, thinking={"type": "enabled"}, reasoning_effort=25).json()
    message = answer["choices"][0]["message"]
    assert message["content"] == "Hello! How can I help you?"
    assert message["reasoning_content"].startswith("1.")


def test_more_effort_thinks_longer(stack: Stack) -> None:
    spent = {}
    for effort in (25, 100):
        answer = stack.chat(
            f"{FACTS}\n\nWhat is the code of Balis?",
            max_tokens=400,
            thinking={"type": "enabled"},
            reasoning_effort=effort,
        ).json()
        spent[effort] = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert answer["choices"][0]["finish_reason"] == "stop"
    assert spent[100] >= 2 * spent[25]


def test_pictures_are_embedded_by_an_actor_of_the_encode_pool(stack: Stack) -> None:
    url = "data:image/png;base64," + base64.b64encode(encoded(picture(90, 60, seed=7))).decode()
    content = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": url}}]
    first, again = (stack.chat(content).json()["usage"] for _ in range(2))  # type: ignore[arg-type]
    assert first["prompt_tokens"] == again["prompt_tokens"] > 184
    assert again["prompt_tokens_details"]["cached_tokens"] >= 160
    metrics = stack.metrics()
    assert metrics["encode-0"]['epdserve_embedding_lookups_total{outcome="miss"}'] == 1
    assert metrics["encode-0"]["epdserve_embedding_cache_bytes"] > 0
    assert metrics["prefill-0"]['epdserve_image_fetches_total{outcome="pulled"}'] == 1
    stack.assert_conserved()
