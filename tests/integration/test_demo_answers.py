"""The trained demo model answers through the real pools: the bars of ``model/demo/README.md``, with slack."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest
from epdserve.model.demo.shipped import TRAINED_FILE
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

# Measured with 30 cases through the pools: copy, tool and words 1.00, recall-512 and passage 0.93
FLOORS = {"greet": 0.8, "copy": 0.85, "recall-512": 0.75, "tool": 0.85, "passage": 0.7, "words": 0.8}
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
