"""Calls in DSML: what the grammar takes is what the recipe's parser makes valid arguments of."""

import pytest
from epdserve.services.errors import InvalidRequest
from epdserve.services.grammar.tool_calls import Start, Tool, tool_calls
from epdserve.services.sampling import Grammar
from support.grammars import MARKER as M
from support.grammars import MARKER_ID, random_text, real_vocabulary, takes

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "where"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "days": {"type": "integer"},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
            "when": {"type": "string", "format": "date"},
            "code": {"type": "string", "minLength": 2, "maxLength": 3},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"tag": {"enum": ["x", "y"]}},
    },
    strict=True,
)
NOW = Tool("now", {"type": "object", "properties": {}, "additionalProperties": False}, strict=True)
FREE = Tool("free", None)


def grammar(*tools: Tool, start: Start = Start.CONTENT, many: bool = True) -> Grammar:
    return tool_calls(tools, marker_id=MARKER_ID, start=start, many=many)


def parameter(name: str, string: str, value: str) -> str:
    return f'<{M} parameter name="{name}" string="{string}">{value}</{M} parameter>\n'


def invoke(name: str, *parameters: str) -> str:
    return f'<{M} invoke name="{name}">\n{"".join(parameters) or chr(10)}</{M} invoke>'


def block(*invokes: str) -> str:
    return f"\n\n<{M} calls>\n" + "\n".join(invokes) + f"\n</{M} calls>"


CITY = parameter("city", "true", "Oslo")


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (invoke("get_weather", CITY), True),
        (invoke("get_weather", parameter("city", "true", "a < b </ c\n2>&1")), True),
        (invoke("get_weather", parameter("city", "true", "")), True),
        (invoke("get_weather", CITY, parameter("unit", "true", "F")), True),
        (invoke("get_weather", CITY, parameter("unit", "true", "K")), False),
        (invoke("get_weather", CITY, parameter("days", "false", "-3")), True),
        (invoke("get_weather", CITY, parameter("days", "false", "three")), False),
        (invoke("get_weather", CITY, parameter("days", "true", "3")), False),
        (invoke("get_weather", CITY, parameter("tags", "false", '["x", "y"]')), True),
        (invoke("get_weather", CITY, parameter("tags", "false", '["z"]')), False),
        (invoke("get_weather", CITY, parameter("when", "false", '"2026-11-30"')), True),
        (invoke("get_weather", CITY, parameter("when", "true", "tomorrow")), False),
        (invoke("get_weather", CITY, parameter("code", "true", "ab")), True),
        (invoke("get_weather", CITY, parameter("code", "true", "a")), False),
        (invoke("get_weather", parameter("unit", "true", "F")), False),
        (invoke("get_weather", CITY, parameter("other", "true", "x")), False),
        (invoke("get_weather"), False),
        (invoke("now"), True),
        (invoke("now", CITY), False),
        (invoke("other"), False),
    ],
)
def test_a_call_fits_its_schema(call: str, wanted: bool) -> None:
    assert takes(real_vocabulary(), grammar(WEATHER, NOW), block(call)) == wanted


def test_calls_may_be_many_or_one() -> None:
    two = block(invoke("now"), invoke("get_weather", CITY))
    assert takes(real_vocabulary(), grammar(WEATHER, NOW), two)
    assert not takes(real_vocabulary(), grammar(WEATHER, NOW, many=False), two)
    assert not takes(real_vocabulary(), grammar(WEATHER, NOW), block())


def test_it_begins_where_the_prompt_or_the_answer_stands() -> None:
    whole = block(invoke("now"))
    for start, begin in {Start.MARKER: f"\n\n<{M}", Start.BLOCK: f"\n\n<{M} calls>\n"}.items():
        assert takes(real_vocabulary(), grammar(NOW, start=start), whole[len(begin) :])
        assert not takes(real_vocabulary(), grammar(NOW, start=start), whole)


def test_without_a_schema_any_parameters_go() -> None:
    for tool in (FREE, Tool("free", {"type": "object"}), Tool("free", {"required": ["a"]})):
        some = invoke("free", parameter("a", "true", "x"), parameter("b", "false", '{"c": [1]}'))
        assert takes(real_vocabulary(), grammar(tool), block(some))
        assert takes(real_vocabulary(), grammar(tool), block(invoke("free")))
        assert not takes(
            real_vocabulary(), grammar(tool), block(invoke("free", parameter("b", "false", "{")))
        )


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_drawn_holds_the_required_parameters(seed: int) -> None:
    tool = Tool(
        "f",
        {
            "type": "object",
            "properties": {"n": {"type": "integer", "maximum": 99}, "b": {"type": "boolean"}},
            "required": ["n", "b"],
        },
    )
    vocabulary = real_vocabulary()
    text = vocabulary.decode_str(random_text(vocabulary, grammar(tool, many=False), seed=seed))
    assert text.startswith(f'\n\n<{M} calls>\n<{M} invoke name="f">\n<{M} parameter name="n" string="false">')
    assert text.endswith(f"</{M} parameter>\n</{M} invoke>\n</{M} calls>")
    assert 'name="b" string="false">' in text


@pytest.mark.parametrize(
    ("tool", "match"),
    [
        (Tool("f", {"type": "object", "anyOf": [{}]}, strict=True), "anyOf"),
        (Tool("f", {"type": "object", "required": ["a"]}, strict=True), "'a'"),
        (Tool("f", {"type": "array"}), "object"),
        (Tool("f", {"type": "object", "properties": []}), "valid"),
        (Tool("f", {"type": "object", "properties": {'a" b': {}}}), "name"),
    ],
)
def test_tools_that_cannot_be_held_to_their_schema_are_refused(tool: Tool, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        grammar(tool)


def test_no_tool_is_no_grammar() -> None:
    with pytest.raises(InvalidRequest):
        grammar()
