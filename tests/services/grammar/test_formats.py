"""Formats of whole answers, against the published vocabulary."""

import json

import pytest
from epdserve.services.errors import InvalidRequest
from epdserve.services.grammar import formats
from epdserve.services.sampling import Grammar
from support.grammars import MARKER, random_text, real_vocabulary, takes

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("grammar", "text", "wanted"),
    [
        (formats.json_object(), '{"a": [1, null, "\\n\N{SNOWMAN}"]}', True),
        (formats.json_object(), "[1]", False),
        (formats.json_object(), '{"a": 1', False),
        (formats.json_schema(PERSON), '{"name": "Ada", "age": 36}', True),
        (formats.json_schema(PERSON), '{\n  "name": "Ada",\n  "age": 36\n}', True),
        (formats.json_schema(PERSON), '{"name": "Ada", "age": "36"}', False),
        (formats.json_schema(PERSON), '{"name": "Ada", "age": 36, "x": 1}', False),
        (formats.json_schema(PERSON), f'{{"name": "{" " * 3}", "age":{" " * 65}1}}', False),
        (formats.choice(["yes", 'no "really"']), 'no "really"', True),
        (formats.choice(["yes", "no"]), "maybe", False),
        (formats.regex(r"[0-9]{4}-[0-9]{2}"), "2026-11", True),
        (formats.regex(r"[0-9]{4}-[0-9]{2}"), "2026-11-", False),
        (formats.lark('start: "a" b?\nb: /b+/'), "abb", True),
        (formats.lark('start: "a" b?\nb: /b+/'), "bb", False),
    ],
)
def test_texts_in_a_format_and_others(grammar: Grammar, text: str, wanted: bool) -> None:
    assert takes(real_vocabulary(), grammar, text) == wanted


def test_a_marker_is_no_character_of_a_string() -> None:
    assert not takes(real_vocabulary(), formats.json_object(), f'{{"a": "{MARKER}"}}')
    assert not takes(real_vocabulary(), formats.json_object(), '{"a": "\N{BULLET}"}' + MARKER)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_drawn_is_json_of_the_schema(seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer", "minimum": 3, "maximum": 12}},
        "required": ["kind", "n"],
        "additionalProperties": False,
    }
    vocabulary = real_vocabulary()
    text = vocabulary.decode_str(random_text(vocabulary, formats.json_schema(schema), seed=seed))
    value = json.loads(text)
    assert value.keys() == {"kind", "n"}
    assert value["kind"] in "ab"
    assert 3 <= value["n"] <= 12


def test_keywords_that_cannot_be_enforced_are_refused_only_if_strict() -> None:
    schema = {"type": "object", "not": {"required": ["a"]}}
    with pytest.raises(InvalidRequest, match="not"):
        takes(real_vocabulary(), formats.json_schema(schema), "{}")
    assert takes(real_vocabulary(), formats.json_schema(schema, strict=False), "{}")


def test_a_structural_tag_is_free_around_its_parts() -> None:
    grammar = formats.structural_tag(
        [
            formats.TaggedPart("<f=a>", {"type": "integer"}, "</f>"),
            formats.TaggedPart("<f=b>", PERSON, "</f>"),
        ],
        ["<f="],
    )
    for text, wanted in {
        "nothing at all": True,
        "see <f=a>12</f> and <f=a>3</f>.": True,
        'see <f=b>{"name": "", "age": 1}</f>': True,
        "see <f=a>x</f>": False,
        "see <f=c>1</f>": False,
    }.items():
        assert takes(real_vocabulary(), grammar, text) == wanted, text


@pytest.mark.parametrize(
    "build",
    [
        lambda: formats.choice([]),
        lambda: formats.choice(["a", ""]),
        lambda: formats.json_schema([]),  # type: ignore[arg-type]
        lambda: formats.structural_tag([], ["<"]),
        lambda: formats.structural_tag([formats.TaggedPart("<a>", {}, "")], ["<b"]),
    ],
)
def test_formats_without_meaning_are_refused(build) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidRequest):
        build()
