"""What one body may hold."""

from typing import Any

import pytest
from epdserve.services.errors import InvalidRequest
from epdserve.services.router.tenancy.body_limits import BodyLimits
from epdserve.services.router.tenancy.config import TenancySettings

LIMITS = BodyLimits(messages=2, parts=3, tools=1, stops=2, depth=5)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{}] * 3}, "messages"),
        ({"input": ["a"] * 3}, "input"),
        ({"messages": [{"content": ["a"] * 4}]}, "messages.content"),
        ({"tools": [{}] * 2}, "tools"),
        ({"stop": ["a"] * 3}, "stop"),
        ({"stop_sequences": ["a"] * 3}, "stop_sequences"),
        ({"messages": [{}, {"a": nested(5)}]}, "messages[1]"),
        ({"response_format": {"a": nested(900)}}, "response_format"),
    ],
)
def test_too_much_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        LIMITS.check(body)
    assert caught.value.param == param
    BodyLimits(0, 0, 0, 0, 0).check(body)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{}] * 10_001}, "messages"),
        ({"input": ["a"] * 10_001}, "input"),
        ({"messages": [{"content": ["a"] * 1_001}]}, "messages.content"),
        ({"tools": [{}] * 1_025}, "tools"),
        ({"stop": ["a"] * 10_000}, "stop"),
        ({"metadata": {"a": nested(200)}}, "metadata"),
    ],
)
def test_limits_that_nobody_set_are_there(body: dict[str, Any], param: str) -> None:
    for limits in (BodyLimits(), TenancySettings().body_limits):
        with pytest.raises(InvalidRequest) as caught:
            limits.check(body)
        assert caught.value.param == param


def test_what_is_within_the_limits_passes() -> None:
    LIMITS.check({"messages": [{"content": ["a"] * 3}, {"a": nested(4)}], "tools": [{}], "stop": "abc"})
    for other in (None, [], "text", 3, [[{}] * 9]):
        LIMITS.check(other)
