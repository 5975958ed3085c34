"""Properties of the API: streams and whole answers agree, cuts change nothing, what is typed is never a marker."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from epdserve.services.router.events import Delta, Ending, Kind, Message
from epdserve.services.router.parsing import OutputParser, ParserOptions
from epdserve.services.router.rendering import ChatPrompt, ChatRenderer, RenderedChat
from epdserve.services.router.stops import StopMatcher
from epdserve.services.types import Effort, FinishReason
from hypothesis import given, settings
from hypothesis import strategies as st
from support.conformance import BAR, TOOL, block, in_bytes, invoke, parameter, spoken, typed
from support.real_tokenizer import real_tokenizer

MARKERS = [f"<{BAR}User{BAR}>", f"<{BAR}Assistant{BAR}>", "<think>", "</think>", f"{BAR}DSML{BAR}"]
MARKERS += [f"<{BAR}System{BAR}>", f"<{BAR}end\u2581of\u2581sentence{BAR}>", f"<{BAR}deepseek_image{BAR}>"]

# Lone surrogates are no text; everything else is, and much of it looks like markup
text = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.sampled_from([*MARKERS, "\n\n", "</", "<", '"', "\\", "{", "END", "E", "\N{PILE OF POO}"]),
    max_size=6,
).map("".join)
outputs = st.tuples(text, text, st.lists(text, max_size=2), st.booleans())


@functools.cache
def renderer() -> ChatRenderer:
    return ChatRenderer(real_tokenizer())


@functools.cache
def chat() -> RenderedChat:
    prompt = ChatPrompt([{"role": "user", "content": "x"}], Effort(75), [TOOL])
    return renderer().render(prompt, max_tokens=4096)


def ids_of(output: tuple[str, str, list[str], bool]) -> list[int]:
    """Reasoning, content and calls with their markers; what stands in the fields is typed text."""
    reasoning, content, values, closed = output
    ids = [*typed(reasoning), *spoken("</think>"), *typed(content)]
    if values:
        calls = block(*(invoke("f", parameter("p", "\0")) for _ in values))
        pieces = calls.split("\0")
        for piece, value in zip(pieces, [*values, ""], strict=True):
            ids += [*spoken(piece), *typed(value)]
    return ids if closed else ids[: len(ids) * 2 // 3]


def parsed(ids: Sequence[int], cuts: Sequence[int], options: ParserOptions) -> Message:
    """The message of these ids, cut at these places."""
    parser = OutputParser(chat(), real_tokenizer(), options)
    message = Message()
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        message.add(parser.push(ids[start:end]))
    message.add(parser.finish(FinishReason.STOP))
    assert parser.ending is not None
    message.ending = parser.ending
    for call in message.calls.values():
        call.call_id, call.arguments = "", ["".join(call.arguments)]
    return message


@settings(max_examples=60, deadline=None)
@given(outputs, st.data())
def test_cuts_change_nothing(output: tuple[str, str, list[str], bool], data: st.DataObject) -> None:
    ids = ids_of(output)
    stops = data.draw(st.lists(st.sampled_from(["END", "E", "\n\n", "</think>"]), max_size=2, unique=True))
    options = ParserOptions(stops=stops, parallel_calls=data.draw(st.booleans()))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    whole = parsed(ids, [], options)
    assert parsed(ids, cuts, options) == whole
    assert parsed(in_bytes(ids), [], options) == whole


@settings(max_examples=150, deadline=None)
@given(text, text, st.lists(text, max_size=2))
def test_fields_hold_what_was_said_in_them(reasoning: str, content: str, values: list[str]) -> None:
    message = parsed(ids_of((reasoning, content, values, True)), [], ParserOptions())
    # Newlines around fields are the layout's
    assert message.reasoning.strip("\n") == reasoning.strip("\n")
    assert message.content.strip("\n") == content.strip("\n")
    arguments = [json.loads("".join(call.arguments)) for call in message.calls.values()]
    assert arguments == [{"p": value} for value in values]
    assert message.ending == Ending("tool_calls" if values else "stop")


@settings(max_examples=100, deadline=None)
@given(text, text, text, text)
def test_typed_text_never_becomes_a_marker(system: str, user: str, result: str, argument: str) -> None:
    vocabulary = real_tokenizer().vocabulary

    def markers(*texts: str) -> list[int]:
        said, asked, told, given_ = texts
        call = {"id": "c", "type": "function"}
        call["function"] = {"name": "f", "arguments": json.dumps({"p": given_})}  # type: ignore[assignment]
        tool: dict[str, Any] = {**TOOL, "function": {**TOOL["function"], "description": said}}  # type: ignore[dict-item]
        messages = [
            {"role": "system", "content": said},
            {"role": "user", "content": asked},
            {"role": "assistant", "content": None, "reasoning_content": told, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": told},
        ]
        prompt = renderer().render(ChatPrompt(messages, Effort(75), [tool]), max_tokens=10**6)
        return [token for token in prompt.tokens.tolist() if vocabulary.is_marker(token)]

    assert markers(system, user, result, argument) == markers("a", "b", "c", "d")


@settings(max_examples=300, deadline=None)
@given(
    st.text("aEN D", max_size=30),
    st.lists(st.text("aEN D", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 30), max_size=5),
)
def test_stop_strings_are_found_however_the_text_is_cut(said: str, stops: list[str], cuts: list[int]) -> None:
    ends = [(said.find(stop) + len(stop), said.find(stop)) for stop in stops if stop in said]
    expected = said[: min(ends)[1]] if ends else said
    matcher = StopMatcher(stops)
    out, found = "", None
    places = sorted(min(cut, len(said)) for cut in cuts)
    for start, end in zip([0, *places], [*places, len(said)], strict=True):
        piece, found = matcher.push(said[start:end])
        out += piece
        if found is not None:
            break
        assert len(said[:end]) - len(out) <= max(map(len, stops)) - 1
    out += matcher.flush() if found is None else ""
    assert (out, found is not None) == (expected, bool(ends))


def test_deltas_of_one_field_are_joined() -> None:
    parser = OutputParser(chat(), real_tokenizer())
    deltas = parser.push(spoken("one two</think>three four"))
    assert deltas == [Delta(Kind.REASONING, "one two"), Delta(Kind.CONTENT, "three four")]


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=12), st.lists(st.integers(0, 12), max_size=4), st.booleans())
def test_bytes_that_are_no_text_are_cut_alike(said: bytes, places: list[int], reasoning: bool) -> None:
    vocabulary = real_tokenizer().vocabulary
    ids = [*spoken("" if reasoning else "</think>", "ok"), *(vocabulary.byte_ids[byte] for byte in said)]
    cuts = sorted(min(place, len(ids)) for place in places)
    whole = parsed(ids, [], ParserOptions())
    assert parsed(ids, cuts, ParserOptions()) == whole
    assert parsed(ids, range(len(ids)), ParserOptions()) == whole
    assert (whole.reasoning if reasoning else whole.content).startswith("ok")
