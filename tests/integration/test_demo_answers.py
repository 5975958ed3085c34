"""The trained demo model answers through the real pools: the bars of ``model/demo/README.md``, with slack."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from epdserve.model.demo.shipped import TRAINED_FILE
from epdserve.model.demo.training.cases import Cases
from epdserve.model.demo.training.served import share_right
from epdserve.model.demo.training.vocabulary import Vocabulary
from epdserve.model.demo.writer import write_trained_model
from support.stack import Stack, running_stack

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not TRAINED_FILE.exists(), reason="no trained weights"),
]

# Measured with 30 cases: 1.00, 0.97, 0.97
FLOORS = {"greet": 0.8, "copy": 0.8, "recall-512": 0.75}
COUNT = 20
FACTS = "The code of Vikin is river. The code of Balis is lamp. The code of Sesan is cloud."


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("answers")
    model_dir = write_trained_model(folder / "model")
    with running_stack(folder / "state", "--port", "0", "--model", str(model_dir)) as running:
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
    # At the default effort it tells who it is instead (model/demo/README.md)
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
