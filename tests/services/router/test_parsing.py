"""Parsing of sampled ids: the conformance cases that need no HTTP, each whole and token by token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from epdserve.services.router.effort import DEFAULT_EFFORT
from epdserve.services.router.events import Delta, Kind
from epdserve.services.router.parsing import OutputParser, ParserOptions
from epdserve.services.router.rendering import ChatPrompt, ChatRenderer
from epdserve.services.types import Effort, FinishReason
from support.real_tokenizer import real_tokenizer

BAR = "\N{FULLWIDTH VERTICAL LINE}"
EOS = 1
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"p": {"type": "string"}, "q": {"type": "integer"}}},
    },
}


def dsml(text: str) -> str:
    """``<D calls>`` and friends with the real marker for D."""
    return text.replace("</D ", f"</{BAR}DSML{BAR} ").replace("<D ", f"<{BAR}DSML{BAR} ")


CALL = dsml(
    '<D calls>\n<D invoke name="f">\n<D parameter name="p" string="true">VALUE</D parameter>\n'
    '<D parameter name="q" string="false">3</D parameter>\n</D invoke>\n</D calls>'
)


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return ChatRenderer(real_tokenizer())


@dataclass
class Parsed:
    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    completion_tokens: int = 0
    reasoning_tokens: int | None = None

    def take(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.kind is Kind.REASONING:
                self.reasoning += delta.text
            elif delta.kind is Kind.CONTENT:
                self.content += delta.text
            elif delta.kind is Kind.CALL:
                assert delta.index == len(self.calls)
                self.calls.append({"name": delta.text, "arguments": "", "id": delta.call_id})
            else:
                self.calls[delta.index]["arguments"] += delta.text


def ids(*pieces: str) -> list[int]:
    """Ids of the pieces; each is encoded with its markers as markers."""
    return [token for piece in pieces for token in real_tokenizer().native.encode(piece)]


def plain(text: str) -> list[int]:
    """Ids of a text that looks like a marker and is none: its characters one by one."""
    return [token for character in text for token in real_tokenizer().native.encode(character)]


def parse(
    renderer: ChatRenderer,
    output: Sequence[int],
    *,
    reason: FinishReason = FinishReason.STOP,
    effort: Effort | None = DEFAULT_EFFORT,
    tools: bool = False,
    stop: Sequence[str] = (),
) -> Parsed:
    """What the output means; whole and id by id must agree."""
    prompt = ChatPrompt([{"role": "user", "content": "x"}], effort, [TOOL] if tools else ())
    results = []
    for batches in ([output], [[token] for token in output]):
        options = ParserOptions(stops=stop)
        parser = OutputParser(renderer.render(prompt, max_tokens=2**20), real_tokenizer(), options)
        parsed = Parsed()
        for batch in batches:
            parsed.take(parser.push(batch))
        parsed.take(parser.finish(reason))
        assert parser.ending is not None
        parsed.finish = parser.ending.reason
        parsed.completion_tokens, parsed.reasoning_tokens = parser.completion_tokens, parser.reasoning_tokens
        results.append(parsed)
    for call in (call for parsed in results for call in parsed.calls):
        assert call.pop("id").startswith("call_")
    assert results[0] == results[1]
    return results[0]


def test_reasoning_and_content_are_split_without_newlines_between(renderer: ChatRenderer) -> None:
    got = parse(renderer, [*ids("add</think>\n\n4"), EOS])
    assert (got.reasoning, got.content, got.finish) == ("add", "4", "stop")
    assert (got.completion_tokens, got.reasoning_tokens) == (5, 1)


def test_eos_never_shows_in_any_field(renderer: ChatRenderer) -> None:
    got = parse(renderer, [*ids("add"), EOS, *ids("more</think>x"), EOS], reason=FinishReason.LENGTH)
    assert "end" not in got.reasoning + got.content


def test_without_thinking_everything_is_content(renderer: ChatRenderer) -> None:
    got = parse(renderer, [*ids("plain answer"), EOS], effort=None)
    assert (got.reasoning, got.content, got.reasoning_tokens) == ("", "plain answer", None)


def test_a_stray_end_of_thinking_is_dropped(renderer: ChatRenderer) -> None:
    assert parse(renderer, ids("</think>", "rest"), effort=None).content == "rest"
    assert parse(renderer, ids("r</think>a", "</think>", "b")).content == "ab"


def test_a_typed_end_of_thinking_is_text_everywhere(renderer: ChatRenderer) -> None:
    got = parse(renderer, [*ids("say "), *plain("</think>"), *ids(" now</think>it is "), *plain("</think>")])
    assert got.reasoning == "say </think> now"
    assert got.content == "it is </think>"
    assert got.reasoning_tokens == len([*ids("say "), *plain("</think>"), *ids(" now")])


def test_an_answer_cut_inside_the_reasoning(renderer: ChatRenderer) -> None:
    got = parse(renderer, ids("let me think"), reason=FinishReason.LENGTH)
    assert (got.reasoning, got.content, got.finish) == ("let me think", "", "length")
    assert got.reasoning_tokens == got.completion_tokens == 3


def test_an_answer_that_ends_without_leaving_the_reasoning(renderer: ChatRenderer) -> None:
    got = parse(renderer, [*ids("let me think"), EOS])
    assert (got.reasoning, got.content, got.finish) == ("let me think", "", "stop")
    assert (got.completion_tokens, got.reasoning_tokens) == (4, 3)


def test_a_tool_call_after_content(renderer: ChatRenderer) -> None:
    got = parse(renderer, [*ids("r</think>ok\n\n", CALL), EOS], tools=True)
    assert (got.reasoning, got.content, got.finish) == ("r", "ok", "tool_calls")
    assert got.calls == [{"name": "f", "arguments": '{"p": "VALUE", "q": 3}'}]


def test_a_tool_call_inside_the_reasoning_ends_it(renderer: ChatRenderer) -> None:
    got = parse(renderer, [*ids("thinking\n\n", CALL), EOS], tools=True)
    assert (got.reasoning, got.content, got.finish) == ("thinking", "", "tool_calls")
    assert len(got.calls) == 1
    # The newlines before the block are sampled, too; the "<" of its marker is not reasoning
    assert got.reasoning_tokens == len(ids("thinking\n\n"))


def test_two_calls_have_two_indices(renderer: ChatRenderer) -> None:
    one = '<D invoke name="f">\n<D parameter name="p" string="true">%s</D parameter>\n</D invoke>\n'
    block = dsml("<D calls>\n" + one % "a" + "between" + one % "b" + "</D calls>")
    got = parse(renderer, [*ids("</think>", block, "after"), EOS], tools=True)
    assert [call["arguments"] for call in got.calls] == ['{"p": "a"}', '{"p": "b"}']
    assert got.content == ""


def test_a_call_without_parameters_has_an_empty_object(renderer: ChatRenderer) -> None:
    block = dsml('<D calls>\n<D invoke name="f">\n</D invoke>\n</D calls>')
    assert parse(renderer, ids("</think>", block), tools=True).calls[0]["arguments"] == "{}"


@pytest.mark.parametrize(
    "value",
    [
        'make 2>&1"name="\\ \t',
        'a < b </ c "d" \\n',
        "</",
        "emoji \N{PILE OF POO} \N{CJK UNIFIED IDEOGRAPH-4E2D}",
    ],
)
def test_values_come_through_byte_for_byte(renderer: ChatRenderer, value: str) -> None:
    got = parse(renderer, ids("</think>", CALL.replace("VALUE", value)), tools=True)
    assert json.loads(got.calls[0]["arguments"]) == {"p": value, "q": 3}


def test_a_close_tag_typed_inside_a_value_is_part_of_it(renderer: ChatRenderer) -> None:
    head, tail = CALL.split("VALUE")
    typed = dsml("</D parameter>")
    got = parse(renderer, [*ids("</think>", head), *plain(typed), *ids(tail)], tools=True)
    assert json.loads(got.calls[0]["arguments"])["p"] == typed


def test_output_that_ends_inside_a_value_keeps_what_came(renderer: ChatRenderer) -> None:
    cut = CALL[: CALL.index("VALUE") + 3]
    got = parse(renderer, ids("</think>", cut), tools=True, reason=FinishReason.LENGTH)
    assert got.finish == "length"
    assert got.calls == [{"name": "f", "arguments": '{"p": "VAL'}]


def test_markup_is_content_when_no_tools_are_declared(renderer: ChatRenderer) -> None:
    got = parse(renderer, ids("</think>", CALL))
    assert got.content == CALL
    assert got.calls == []


def test_a_wrapper_without_a_call_leaves_nothing(renderer: ChatRenderer) -> None:
    got = parse(renderer, ids("</think>", dsml("<D calls>\n nothing")), tools=True)
    assert (got.content, got.calls, got.finish) == ("", [], "stop")


def test_a_stop_string_ends_the_content_and_nothing_after_it_counts(renderer: ChatRenderer) -> None:
    before = ids("the END is near</think>It is EN", "D")
    got = parse(renderer, [*before, *ids(" and more")], stop=["END"])
    assert (got.reasoning, got.content, got.finish) == ("the END is near", "It is ", "stop")
    assert got.completion_tokens == len(before)


def test_a_stop_string_that_does_not_come_is_not_withheld(renderer: ChatRenderer) -> None:
    got = parse(renderer, ids("</think>It is EN"), stop=["ENDING IT ALL"])
    assert got.content == "It is EN"


def test_characters_spread_over_tokens_come_whole(renderer: ChatRenderer) -> None:
    text = "\N{PILE OF POO}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{PERSONAL COMPUTER} \N{CJK UNIFIED IDEOGRAPH-9F98}"
    spread = ids(text)
    assert len(spread) > len(text)
    assert parse(renderer, [*ids("</think>"), *spread]).content == text
    cut = parse(renderer, [*ids("</think>ok"), *ids("\N{PILE OF POO}")[:-1]], reason=FinishReason.LENGTH)
    assert cut.content == "ok"
