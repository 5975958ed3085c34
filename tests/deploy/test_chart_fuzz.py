"""Whatever values the schema allows render to valid objects, or to a reason why they do not go together."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.chart import CHART, helm, objects_of, wrong_with

pytestmark = pytest.mark.needs("helm4")

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
REASONS = (
    "model.volume names",
    "registry.external needs",
    "KubeRay scales its own",
    "give it a hostPath",
    "needs hostPath, or",
)
LETTERS = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12)
Path_ = tuple[str, ...]


def leaves(schema: dict[str, Any], path: Path_ = ()) -> list[tuple[Path_, dict[str, Any]]]:
    """Everything that can be set, with its schema."""
    found = []
    for name, inner in schema.get("properties", {}).items():
        found += leaves(inner, (*path, name)) if inner.get("properties") else [((*path, name), inner)]
    return found


def values_of(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """What a schema allows."""
    if "anyOf" in schema:
        return st.one_of([values_of(each) for each in schema["anyOf"] if each.get("type") != "null"])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kinds = schema.get("type", "object")
    kind = kinds[0] if isinstance(kinds, list) else kinds
    low = schema.get(
        "minimum", schema.get("exclusiveMinimum", -100) + 1 if "exclusiveMinimum" in schema else -100
    )
    high = schema.get("maximum", schema.get("exclusiveMaximum", max(low, 0) + 10_000))
    if kind == "integer":
        step = schema.get("multipleOf", 1)
        return st.integers(-(-int(low) // step), int(high) // step).map(lambda each: each * step)
    if kind == "number":
        return (
            st.floats(low, high, exclude_max="exclusiveMaximum" in schema, width=32)
            .map(lambda each: round(each, 3))
            .filter(
                lambda each: (
                    schema.get("exclusiveMinimum", each - 1) < each
                    and each < schema.get("exclusiveMaximum", each + 1)
                )
            )
        )
    if kind == "boolean":
        return st.booleans()
    if kind == "array":
        items = schema.get("items", {})
        size = max(0, schema.get("minItems", 0))
        return (
            st.lists(values_of(items), min_size=size, max_size=size + 2)
            if items.get("type") != "object" or "properties" in items
            else st.just([])
        )
    if kind == "object" and "properties" in schema:
        required = {
            name: values_of(schema["properties"][name])
            for name in schema.get("required", schema["properties"])
        }
        return st.fixed_dictionaries(required)
    if kind == "object":
        inner = schema.get("additionalProperties")
        keys = st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True)
        return st.dictionaries(keys, values_of(inner), max_size=2) if isinstance(inner, dict) else st.just({})
    return (
        st.from_regex(
            schema["pattern"], fullmatch=True, alphabet=st.characters(min_codepoint=32, max_codepoint=126)
        )
        if "pattern" in schema
        else LETTERS
    )


LEAVES = [leaf for leaf in leaves(SCHEMA) if leaf[0][0] != "global" and leaf[0] != ("model", "demo")]


@st.composite
def chart_values(draw: st.DrawFn) -> dict[str, Any]:
    values: dict[str, Any] = {"model": {"demo": True}}
    for path, schema in draw(
        st.lists(st.sampled_from(LEAVES), min_size=1, max_size=12, unique_by=lambda leaf: leaf[0])
    ):
        node = values
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = draw(values_of(schema))
    return values


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(values=chart_values())
def test_allowed_values_render_to_valid_objects_or_to_a_reason(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    file = tmp_path_factory.mktemp("fuzz") / "values.json"
    file.write_text(json.dumps(values))
    run = helm("helm4", "template", "r", CHART, "-f", file)
    if run.returncode != 0:
        assert any(reason in run.stderr for reason in REASONS), run.stderr
        return
    found = objects_of(run.stdout)
    wrong = {
        f"{each['kind']} {each['metadata']['name']}": text for each in found if (text := wrong_with(each))
    }
    assert wrong == {}
    config = next(each for each in found if each["kind"] == "ConfigMap" and "epdserve.toml" in each["data"])
    table = tomllib.loads(config["data"]["epdserve.toml"])
    for section, given_ in values.get("config", {}).items():
        assert section in table or not given_
