"""Tools in the terminal chat."""

import json
from pathlib import Path
from typing import Any

import pytest
from epdserve.services.cli.chat import Turn
from epdserve.services.cli.chat_tools import Calls, read_tools
from epdserve.services.cli.errors import CommandError

BARE = {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}


def piece(index: int = 0, **function: str) -> dict[str, Any]:
    return {"index": index, "function": function}


def test_calls_are_put_together_from_their_pieces() -> None:
    calls = Calls()
    assert not calls
    calls.take({"index": 1, "id": "b", "type": "function", "function": {"name": "stop"}})
    calls.take({"index": 0, "id": "a", "type": "function", "function": {"name": "get", "arguments": ""}})
    for part in ('{"city": ', '"Rome", "days"', ": 2}"):
        calls.take(piece(arguments=part))
    calls.take(piece(1, arguments="{brok"))
    assert calls.lines() == ['get(city="Rome", days=2)', "stop({brok)"]
    assert [call["id"] for call in calls.listed()] == ["a", "b"]


def test_an_answer_that_calls_goes_into_the_history_with_its_calls() -> None:
    turn = Turn(content=["so"])
    assert "tool_calls" not in turn.message()
    turn.calls.take({"index": 0, "id": "a", "function": {"name": "get", "arguments": "{}"}})
    assert turn.message()["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "get", "arguments": "{}"}}
    ]


def test_functions_may_be_bare_or_as_the_api_has_them(tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([BARE, {"type": "function", "function": BARE}]))
    assert read_tools(file) == [{"type": "function", "function": BARE}] * 2


@pytest.mark.parametrize("text", ["{", '{"name": "x"}', "[1]"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tools.json"
    file.write_text(text)
    with pytest.raises(CommandError, match="tools"):
        read_tools(file)
