from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest
from epdserve.services.observability.logs import JsonFormatter, for_request, setup_logging

log = logging.getLogger("epdserve.test")


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    setup_logging(stream=stream, fields={"role": "decode"})
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def last(stream: io.StringIO) -> dict[str, object]:
    line = stream.getvalue().splitlines()[-1]
    parsed = json.loads(line)
    assert isinstance(parsed, dict)
    return parsed


def test_line_holds_message_fields_and_process(lines: io.StringIO) -> None:
    log.info("block evicted", extra={"page": 3, "reason": "space", "ratio": 0.5, "last": True, "none": None})
    line = last(lines)
    assert line.pop("at")
    assert line == {
        "level": "info",
        "logger": "epdserve.test",
        "message": "block evicted",
        "role": "decode",
        "page": 3,
        "reason": "space",
        "ratio": 0.5,
        "last": True,
        "none": None,
    }


def test_debug_is_left_out_by_default(lines: io.StringIO) -> None:
    log.debug("nothing")
    assert lines.getvalue() == ""


async def test_request_id_follows_tasks_and_ends_with_its_block(lines: io.StringIO) -> None:
    async def work() -> None:
        log.info("inside")

    with for_request("r-1"):
        await asyncio.create_task(work())
        assert last(lines)["request_id"] == "r-1"
    log.info("outside")
    assert "request_id" not in last(lines)


@pytest.mark.parametrize("name", ["tokens", "prompt", "tenant_key", "api_key", "token", "Authorization"])
def test_secrets_are_withheld_and_counts_are_not(lines: io.StringIO, name: str) -> None:
    log.info("x", extra={name: "secret"})
    assert "secret" not in lines.getvalue()
    log.info("x", extra={name: [1, 2, 3]})
    assert last(lines)[name] == "(withheld)"
    log.info("x", extra={name: 5})
    assert last(lines)[name] == 5


def test_values_are_plain_and_bounded(lines: io.StringIO) -> None:
    log.info("x", extra={"long": "a" * 10_000, "array": [1, 2], "odd": "caf\u00e9\n"})
    line = last(lines)
    assert len(str(line["long"])) == 500
    assert line["array"] == "(list)"
    assert line["odd"] == "caf\u00e9\n"
    assert lines.getvalue().isascii()


def test_exception_is_one_line(lines: io.StringIO) -> None:
    try:
        raise KeyError("x")
    except KeyError:
        log.exception("failed")
    assert lines.getvalue().count("\n") == 1
    assert "KeyError" in str(last(lines)["trace"])


def test_formatter_without_fields() -> None:
    record = logging.makeLogRecord({"msg": "hello %s", "args": ("you",)})
    assert json.loads(JsonFormatter().format(record))["message"] == "hello you"
