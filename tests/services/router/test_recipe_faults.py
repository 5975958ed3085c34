"""What the recipe gets wrong in outputs, shown on the recipe itself, and that it comes right through us."""

from __future__ import annotations

import json
from typing import Any

import deepseek_recipe as recipe
import orjson
import pytest
from epdserve.services.router.events import Delta, Kind
from epdserve.services.router.recipe_faults import CallTolerance, TagRepair
from support.conformance import OFF, TOOL, block, in_bytes, invoke, parameter, spoken
from support.real_tokenizer import real_tokenizer
from support.recipe_oracle import OPTIONS

SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {
            "p": {"type": "string"},
            "q": {"type": ["integer", "null"]},
            "e": {"enum": [1, 2]},
            "u": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "b": {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
        },
    }
}
DSML = real_tokenizer().dsml_id


def recipe_arguments(ids: list[int]) -> str:
    """Arguments of the calls as the recipe alone parses them."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "tools": [TOOL], **OFF}
    conversion = recipe.ChatCompletionRequest(orjson.dumps(body)).convert(OPTIONS)
    generator = recipe.ChatCompletionRequest.chunk_generator(conversion, "", "")
    processor = recipe.StreamProcessor(generator, conversion.parsing_options, real_tokenizer().native)
    events = processor.push(recipe.InferenceChunk.ready())
    for token in ids:
        events += processor.push(recipe.InferenceChunk.tokens([token]))
    deltas = [json.loads(event.to_json())["choices"][0]["delta"] for event in events]
    return "".join(c["function"]["arguments"] for delta in deltas for c in delta.get("tool_calls", ()))


def repaired(ids: list[int]) -> list[int]:
    repair = TagRepair(real_tokenizer().vocabulary, DSML, SCHEMAS)
    return [passed for token in ids for passed in repair.push(token)] + repair.flush()


def test_the_recipe_breaks_a_parameter_without_its_type() -> None:
    ids = spoken(block(invoke("f", parameter("p", "abc", string=None))))
    with pytest.raises(json.JSONDecodeError):
        json.loads(recipe_arguments(ids))
    assert recipe_arguments(repaired(ids)) == '{"p": "abc"}'


@pytest.mark.parametrize("cut", [list, in_bytes], ids=["tokens", "bytes"])
@pytest.mark.parametrize(
    ("name", "value", "arguments"),
    [
        ("p", "3", '"3"'),
        ("q", "3", "3"),
        ("e", "1", "1"),
        ("u", "3", '"3"'),
        ("b", "true", "true"),
        ("unknown", "3", '"3"'),
        ("stra\u00dfe", "3", '"3"'),
    ],
)
def test_types_come_from_the_schema(cut: Any, name: str, value: str, arguments: str) -> None:
    ids = cut(spoken(block(invoke("f", parameter(name, value, string=None)))))
    assert recipe_arguments(repaired(ids)) == f'{{"{name}": {arguments}}}'


def test_what_is_well_formed_is_not_touched() -> None:
    ids = spoken("text <", block(invoke("f", parameter("p", "a > b"), parameter("q", "3", string="false"))))
    assert repaired(ids) == ids
    assert repaired(in_bytes(ids)) == in_bytes(ids)
    cut = spoken(block(invoke("f", parameter("p", "x"))))[:-30]
    assert repaired(cut) == cut


def calls(tolerance: CallTolerance, *pieces: str, complete: bool = True) -> list[Delta]:
    deltas: list[Delta] = []
    tolerance.push(Delta(Kind.CALL, "f", 0, "id"), deltas)
    for piece in pieces:
        tolerance.push(Delta(Kind.ARGUMENTS, piece, 0), deltas)
    tolerance.finish(deltas, complete=complete)
    return deltas


def test_arguments_that_cannot_be_wrapped_are_not_held_back() -> None:
    tolerance, deltas = CallTolerance(SCHEMAS), []  # type: ignore[var-annotated]
    tolerance.push(Delta(Kind.CALL, "f", 0, "id"), deltas)
    for piece, sent in (('{"', ""), ("p", '{"p'), ('": "', '{"p": "')):
        tolerance.push(Delta(Kind.ARGUMENTS, piece, 0), deltas)
        assert "".join(delta.text for delta in deltas[1:]) == sent


def test_a_wrapper_that_a_limit_cut_is_passed_on_as_it_is() -> None:
    *_, last = calls(CallTolerance(SCHEMAS), '{"arguments": {"p": "x', complete=False)
    assert last.text == '{"arguments": {"p": "x'
    *_, last = calls(CallTolerance(SCHEMAS), '{"arguments": ', '{"p": "x"}', "}")
    assert last.text == '{"p": "x"}'


def test_only_complete_calls_can_be_invalid() -> None:
    for text, complete, invalid in (("{", True, 1), ("{", False, 0), ("{}", True, 0), ("[]", True, 1)):
        tolerance = CallTolerance(SCHEMAS)
        calls(tolerance, text, complete=complete)
        assert tolerance.invalid == invalid
