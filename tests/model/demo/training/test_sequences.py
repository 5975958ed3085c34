"""Training sequences are what the official encoder renders, and answers are what is learnt."""

import json
import random
import re
from itertools import pairwise
from typing import Any

import deepseek_recipe as recipe
import pytest
from epdserve.model.demo.training import talk, thought, tooling
from epdserve.model.demo.training.opening import Openings
from epdserve.model.demo.training.sequences import Sequences
from epdserve.model.demo.training.vocabulary import SILENT, Vocabulary

VOCABULARY = Vocabulary()
OPENINGS = Openings(VOCABULARY)
ENCODING = recipe.DeepseekV41Encoding().with_tokenizer(recipe.Tokenizer.from_str(VOCABULARY.definition))
KINDS = ("stream", "copy", "recall", "search", "talk", "json", "tools", "chains", "ponder")


def rendered(
    messages: list[dict[str, Any]], *, effort: str | None = None, tools: tuple[Any, ...] = ()
) -> list[int]:
    """A conversation with the header of the next answer."""
    body: dict[str, Any] = {"model": "DeepSeek-V4.1-Flash", "messages": messages}
    body["thinking"] = {"type": "disabled" if effort is None else "enabled"}
    if effort is not None:
        body["reasoning_effort"] = effort
    if tools:
        body["tools"] = [{"type": "function", "function": tool} for tool in tools]
    request = recipe.ChatCompletionRequest(json.dumps(body).encode())
    ids: list[int] = ENCODING.encode(request.convert(recipe.ConversionOptions()).conversation)
    return ids


def test_turns_are_as_the_official_encoder_lays_them_out() -> None:
    strip = OPENINGS.strip(effort=75, system="Be brief.")
    strip.join(VOCABULARY.turn("Hello", VOCABULARY.encode("Hello!"), 0))
    thought_of = VOCABULARY.thought("1. So.", 0)
    strip.join(VOCABULARY.turn("Who are you?", VOCABULARY.encode("A model."), 0, thought=thought_of))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello!", "reasoning_content": "forgotten"},
        {"role": "user", "content": "Who are you?"},
    ]
    answer = [
        *VOCABULARY.encode("1. So."),
        VOCABULARY.think_end,
        *VOCABULARY.encode("A model."),
        VOCABULARY.eos,
    ]
    assert strip.ids == rendered(messages, effort="high") + answer


def test_a_call_and_its_result_are_as_the_official_encoder_lays_them_out() -> None:
    draw = random.Random(1)
    tools = [tooling.draw_tools(draw)[0]]
    request = tooling.draw_request(draw, tools[0])
    strip = OPENINGS.strip(tools=[tool.declared for tool in tools])
    call = VOCABULARY.marked("\n\n" + tooling.call_text(request, "\x00"), "\x00")
    strip.join(VOCABULARY.turn(request.question, call, 0))
    told = f"<tool_result>{request.result}</tool_result>"
    strip.join(VOCABULARY.turn(told, VOCABULARY.encode(request.answer), 0))
    function = {"name": tools[0].declared["name"], "arguments": json.dumps(request.arguments)}
    messages = [
        {"role": "user", "content": request.question},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": request.result},
        {"role": "assistant", "content": request.answer},
    ]
    assert strip.ids == rendered(messages, tools=tuple(tool.declared for tool in tools))[:-2]


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_have_their_length_and_something_to_learn(kind: str) -> None:
    sequences = Sequences(VOCABULARY, OPENINGS, random.Random(2), {kind: 1.0})
    for length in (128, 512):
        ids, labels = sequences.batch(4, length)
        assert ids.shape == labels.shape == (4, length)
        learnt = (labels != SILENT).float().mean()
        assert learnt > (0.03 if length == 512 or kind != "tools" else -1)


def test_the_same_seed_gives_the_same_sequences() -> None:
    first, second = (
        Sequences(VOCABULARY, OPENINGS, random.Random(9), {"talk": 1, "tools": 1}) for _ in range(2)
    )
    assert first.strip(256).ids == second.strip(256).ids


def test_efforts_ask_for_lengths_that_are_clearly_apart() -> None:
    lengths = [
        len(VOCABULARY.encode(thought.reasoning(effort, "I look.", "I say."))) for effort in thought.EFFORTS
    ]
    assert all(later > 1.2 * earlier for earlier, later in pairwise(lengths))
    assert lengths[3] >= 2 * lengths[0]


def test_pondering_thinks_about_facts_before_it_answers() -> None:
    strip = Sequences(VOCABULARY, OPENINGS, random.Random(3), {"ponder": 1.0}).strip(256)
    text = VOCABULARY.tokenizer.decode(strip.ids)
    asked = re.findall(
        r"What is the (?:\w+ of \w+)\?.*?<think>1\. I look for (\w+) in the text\.", text, re.DOTALL
    )
    asked += re.findall(r"In one word, what is .*?<think>1\. I look for (\w+) in the text\.", text, re.DOTALL)
    assert asked
    assert "Reasoning Effort" in text


def test_forms_are_json_after_their_schema() -> None:
    draw = random.Random(4)
    for _ in range(20):
        fields = draw.sample(talk.FIELDS, 3)
        assert list(json.loads(talk.form(draw, fields).answer)) == fields
