"""The next turn hits the answer: drawn ids come back where their text does, per tenant and within a bound."""

import numpy as np
import pytest
from epdserve.services.router.memo import Kept, Turn, TurnMemo
from epdserve.services.router.rendering import ChatPrompt, ChatRenderer
from epdserve.services.types import Effort, TokenIds, token_ids
from support.real_tokenizer import real_tokenizer

TENANT, OTHER = b"tenant-a", b"tenant-b"
TOKENIZER = real_tokenizer()
RENDERER = ChatRenderer(TOKENIZER)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
QUESTION = {"role": "user", "content": "What is it like in Oslo?"}


def memo(max_bytes: int = 2**20) -> TurnMemo:
    return TurnMemo(TOKENIZER, max_bytes=max_bytes)


def render(*messages: dict[str, object], tools: bool = False, thinking: bool = True) -> TokenIds:
    prompt = ChatPrompt(messages, Effort(75) if thinking else None, [WEATHER] if tools else [])
    return RENDERER.render(prompt, max_tokens=100_000).tokens


def letters(text: str) -> list[int]:
    """A tokenisation that no encoder makes: one id a letter."""
    return [TOKENIZER.plain_ids(letter)[0] for letter in text]


def answer(reasoning: str, content: str) -> list[int]:
    return [*letters(reasoning), TOKENIZER.think_end_id, *letters(content), TOKENIZER.eos_id]


def as_drawn(prompt: TokenIds, drawn: list[int]) -> list[int]:
    """What a worker has in its cache after the answer."""
    return [*prompt.tolist(), *drawn]


def test_the_next_turn_begins_with_the_ids_that_were_drawn() -> None:
    """With tools the whole history stays; the canonical ids of the same text are others."""
    remembered, first = memo(), render(QUESTION, tools=True)
    drawn = answer("hmm, Oslo", "It is cold there.")
    assert remembered.note(TENANT, first, drawn) == [Kept.OTHER, Kept.OTHER]
    reply = {"role": "assistant", "reasoning_content": "hmm, Oslo", "content": "It is cold there."}
    second = render(QUESTION, reply, {"role": "user", "content": "And in May?"}, tools=True)
    assert second[: len(first) + len(drawn)].tolist() != as_drawn(first, drawn)
    spliced, turns = remembered.splice(TENANT, second)
    assert turns == [Turn.SPLICED, Turn.SPLICED]
    assert spliced[: len(first) + len(drawn)].tolist() == as_drawn(first, drawn)
    text = TOKENIZER.vocabulary.text_of
    assert text(spliced.tolist()) == text(second.tolist())


def test_reasoning_that_is_not_rendered_again_is_not_missed() -> None:
    remembered, first = memo(), render(QUESTION)
    drawn = answer("hmm", "It is cold there.")
    remembered.note(TENANT, first, drawn)
    reply = {"role": "assistant", "reasoning_content": "hmm", "content": "It is cold there."}
    spliced, turns = remembered.splice(TENANT, render(QUESTION, reply, QUESTION))
    assert turns == [Turn.SPLICED]
    content = [TOKENIZER.think_end_id, *letters("It is cold there."), TOKENIZER.eos_id]
    assert spliced[len(first) - 1 :][: len(content)].tolist() == content


def test_calls_come_back_too() -> None:
    remembered, first = memo(), render(QUESTION, tools=True)
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
    }
    reply = {"role": "assistant", "content": "Let me see.", "tool_calls": [call], "reasoning_content": "x"}
    second = render(QUESTION, reply, {"role": "tool", "tool_call_id": "c", "content": "2 C"}, tools=True)
    start = len(first)
    end = int(np.flatnonzero(second[start:] == TOKENIZER.eos_id)[0]) + start
    canonical = second[start:end].tolist()
    said = TOKENIZER.plain_ids("Let me see")
    at = next(n for n in range(len(canonical)) if canonical[n : n + len(said)] == said)
    drawn = [*canonical[:at], *letters("\nLet me see"), *canonical[at + len(said) :], TOKENIZER.eos_id]
    assert Kept.OTHER in remembered.note(TENANT, first, drawn)
    spliced, turns = remembered.splice(TENANT, second)
    assert Turn.SPLICED in turns
    assert spliced[: start + len(drawn)].tolist() == as_drawn(first, drawn)


def test_newlines_that_are_not_delivered_come_back_with_the_text() -> None:
    remembered, first = memo(), render(QUESTION, tools=True)
    drawn = [
        *TOKENIZER.plain_ids("\nhmm\n\n"),
        TOKENIZER.think_end_id,
        *TOKENIZER.plain_ids("\n\nCold.\n"),
        TOKENIZER.eos_id,
    ]
    assert remembered.note(TENANT, first, drawn) == [Kept.OTHER, Kept.OTHER]
    reply = {"role": "assistant", "reasoning_content": "hmm", "content": "Cold.\n"}
    spliced, _ = remembered.splice(TENANT, render(QUESTION, reply, QUESTION, tools=True))
    assert spliced[: len(first) + len(drawn)].tolist() == as_drawn(first, drawn)


def test_canonical_ids_need_no_splice() -> None:
    remembered, first = memo(), render(QUESTION, thinking=False)
    drawn = [*TOKENIZER.plain_ids("It is cold there."), TOKENIZER.eos_id]
    assert remembered.note(TENANT, first, drawn) == [Kept.CANONICAL]
    reply = {"role": "assistant", "content": "It is cold there."}
    second = render(QUESTION, reply, QUESTION, thinking=False)
    spliced, turns = remembered.splice(TENANT, second)
    assert spliced is second
    assert turns == [Turn.SAME]


def test_an_answer_that_was_cut_by_its_length_comes_back() -> None:
    remembered, first = memo(), render(QUESTION, thinking=False)
    remembered.note(TENANT, first, letters("It is co"))
    reply = {"role": "assistant", "content": "It is co"}
    spliced, turns = remembered.splice(TENANT, render(QUESTION, reply, QUESTION, thinking=False))
    assert turns == [Turn.SPLICED]
    assert spliced[len(first) :][:8].tolist() == letters("It is co")


def test_tenants_remember_apart() -> None:
    remembered, first = memo(), render(QUESTION, thinking=False)
    remembered.note(TENANT, first, letters("Cold."))
    second = render(QUESTION, {"role": "assistant", "content": "Cold."}, QUESTION, thinking=False)
    spliced, turns = remembered.splice(OTHER, second)
    assert spliced is second
    assert turns == [Turn.UNKNOWN]


@pytest.mark.parametrize("said", ["Cold!", "", "cold."])
def test_text_that_was_edited_is_not_spliced(said: str) -> None:
    remembered = memo()
    remembered.note(TENANT, render(QUESTION, thinking=False), letters("Cold."))
    second = render(QUESTION, {"role": "assistant", "content": said}, QUESTION, thinking=False)
    spliced, turns = remembered.splice(TENANT, second)
    assert spliced is second
    assert turns == ([Turn.UNKNOWN] if said else [])


def test_ids_that_are_no_text_are_not_kept() -> None:
    half = TOKENIZER.vocabulary.byte_ids[0xF0]
    assert memo().note(TENANT, render(QUESTION, thinking=False), [half]) == [Kept.NO_TEXT]


def test_a_prompt_that_ends_without_an_answers_header_is_none_of_its_business() -> None:
    assert memo().note(TENANT, token_ids([5, 6, 7]), letters("Cold.")) == []
    assert memo().splice(TENANT, token_ids([5, 6, 7]))[1] == []


def test_memory_is_bounded_and_what_was_forgotten_is_told_from_what_was_never_known() -> None:
    remembered, prompt = memo(4000), render(QUESTION, thinking=False)
    for number in range(40):
        remembered.note(TENANT, prompt, letters(f"Answer {number}."))
        assert remembered.nbytes <= 4000
    asked = [
        render(QUESTION, {"role": "assistant", "content": f"Answer {number}."}, QUESTION, thinking=False)
        for number in (0, 39, 77)
    ]
    assert [remembered.splice(TENANT, prompt)[1] for prompt in asked] == [
        [Turn.EVICTED],
        [Turn.SPLICED],
        [Turn.UNKNOWN],
    ]
    assert memo(100).note(TENANT, prompt, letters("Cold.")) == [Kept.TOO_LONG]


def test_who_holds_most_loses_first() -> None:
    remembered, prompt = memo(4000), render(QUESTION, thinking=False)
    remembered.note(OTHER, prompt, letters("Cold."))
    for number in range(40):
        remembered.note(TENANT, prompt, letters(f"Answer {number}."))
    second = render(QUESTION, {"role": "assistant", "content": "Cold."}, QUESTION, thinking=False)
    assert remembered.splice(OTHER, second)[1] == [Turn.SPLICED]
