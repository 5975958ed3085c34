"""Grammars from hostile clients: an answer within the deadline, and the thread is free again."""

import asyncio
import json
import time
from typing import Any

import pytest
from epdserve.services.errors import InvalidRequest, Overloaded
from epdserve.services.grammar import formats
from epdserve.services.grammar.checking import GrammarChecks, check_grammar
from epdserve.services.grammar.limits import GrammarLimits
from epdserve.services.sampling import Grammar, GrammarKind
from support.grammars import compiled, real_vocabulary

BOUND_S = 5.0  # on a busy machine; alone, none takes 0.2 s


def nested(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + '{"type":"string"}' + "}}" * depth


def schema(value: Any) -> Grammar:
    text = value if isinstance(value, str) else json.dumps(value)
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def chain(count: int, link: Any) -> dict[str, Any]:
    """Definitions of which each names the next one twice."""
    rules = {f"a{n}": link(f"#/$defs/a{n + 1}") for n in range(count)}
    return {"$defs": {**rules, f"a{count}": {"type": "string"}}, "$ref": "#/$defs/a0"}


REFUSED = {
    "nested 1000 deep": schema(nested(1000)),
    "no json": schema("{"),
    "no text satisfies it": schema("false"),
    "a product of alternatives": schema(
        {
            "allOf": [
                {"oneOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(8)]}
                for i in range(12)
            ]
        }
    ),
    "unknown keyword": schema({"type": "object", "not": {"required": ["a"]}}),
    "too long a schema": schema({"enum": [f"value {n}" for n in range(20_000)]}),
    "too long a regex": formats.regex("a" * 20_000),
    "nested regex": formats.regex("(" * 8_000 + ")" * 8_000),
    "unclosed regex": formats.regex("(a"),
    "look-ahead": formats.regex("(?=a)b"),
    "back reference": formats.regex(r"(a)\1"),
    "nested lark": formats.lark("start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "no start": formats.lark('a: "x"'),
    "nested json in lark": formats.lark("start: %json " + nested(1000)),
}
TAKEN = {
    "a regex that backtracking engines choke on": formats.regex("(a+)+b"),
    "nested counts": formats.regex("((a{1,1000}){1,1000}){1,1000}"),
    "exponential automaton": formats.regex("(a|b)*a(a|b){40}"),
    "dots and stars": formats.regex("(.*a){100}"),
    "a doubling chain of objects": schema(
        chain(30, lambda ref: {"type": "object", "properties": {"x": {"$ref": ref}, "y": {"$ref": ref}}})
    ),
    "a doubling chain of conjunctions": schema(
        chain(25, lambda ref: {"allOf": [{"$ref": ref}, {"$ref": ref}]})
    ),
    "many items": schema({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}),
    "long strings": schema({"type": "string", "minLength": 1_000_000}),
    "recursion": schema({"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "null"}]}),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_used_is_refused_in_time(name: str) -> None:
    checks = GrammarChecks()
    began = time.monotonic()
    try:
        with pytest.raises(InvalidRequest) as caught:
            await checks.check(REFUSED[name])
        assert time.monotonic() - began < BOUND_S
        assert caught.value.param == "response_format"
        assert len(caught.value.message) < 400
        assert "\n" not in caught.value.message
        assert checks.counts.refused == 1
    finally:
        checks.close()


@pytest.mark.parametrize("name", TAKEN)
def test_what_looks_dangerous_costs_little(name: str) -> None:
    vocabulary = real_vocabulary()
    began = time.monotonic()
    check_grammar(TAKEN[name], GrammarLimits())
    matcher = compiled(vocabulary, TAKEN[name])
    for token in vocabulary.tokenize_str("aaab"):
        if not matcher.consume_token(token):
            break
        matcher.compute_bitmask()
    assert time.monotonic() - began < BOUND_S


@pytest.mark.parametrize("text", ["#", "#/$defs/a"])
def test_schemas_that_only_name_themselves_are_refused_with_the_vocabulary(text: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be used"):
        compiled(real_vocabulary(), schema({"$ref": text, "$defs": {"a": {"$ref": text}}}))


async def test_a_text_is_checked_once() -> None:
    checks = GrammarChecks()
    for after in (None, 5):
        await checks.check(Grammar(GrammarKind.REGEX, "a+", after))
    await checks.check(Grammar(GrammarKind.LARK, "start: /a+/"))
    assert (checks.counts.passed, checks.counts.known) == (2, 1)
    checks.close()


async def test_a_check_that_takes_too_long_is_given_up_and_the_loop_stays_free() -> None:
    checks = GrammarChecks(GrammarLimits(check_s=0.01, text_bytes=2**22))
    slow = schema({"enum": [f"value {n}" for n in range(100_000)]})
    longest, ticks = 0.0, 0
    check = asyncio.ensure_future(checks.check(slow))
    while not check.done():
        before = time.monotonic()
        await asyncio.sleep(0)
        longest, ticks = max(longest, time.monotonic() - before), ticks + 1
    with pytest.raises(InvalidRequest, match="within"):
        await check
    assert checks.counts.late == 1
    assert ticks > 3
    checks.close()


async def test_only_so_many_wait() -> None:
    checks = GrammarChecks(GrammarLimits(text_bytes=2**22))
    slow = {"enum": [f"value {n}" for n in range(20_000)]}
    waiting = [asyncio.ensure_future(checks.check(schema(slow | {"title": str(n)}))) for n in range(66)]
    await asyncio.sleep(0)
    refused = [task for task in waiting if task.done()]
    assert len(refused) == 2
    with pytest.raises(Overloaded):
        await refused[0]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    checks.close()
