"""JSON lines for a whole process, set up once where it starts.

Modules log constant messages with fields (``log.info("block evicted", extra={...})``); the formatter adds where and
for whom. Prompts, token ids and keys have no place in a log: fields of such names are withheld unless they are
plain numbers, and nothing but plain values is written at all.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Final, TextIO

MAX_VALUE_CHARS: Final = 500
MAX_TRACE_CHARS: Final = 8_000

WITHHELD_FIELDS: Final = frozenset(
    {
        "api_key",
        "authorization",
        "body",
        "content",
        "emitted",
        "ids",
        "key",
        "messages",
        "prompt",
        "tenant_key",
        "text",
        "token",
        "token_ids",
        "tokens",
    }
)

request_id: ContextVar[str] = ContextVar("request_id", default="")

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class for_request:  # noqa: N801 - reads as what it does
    """Log lines inside carry this request id, in whatever tasks start there too."""

    __slots__ = ("_before", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._before = request_id.set(self._name)

    def __exit__(self, *_: object) -> None:
        request_id.reset(self._before)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``at``, ``level``, ``logger``, ``message``, the process's fields, the record's."""

    def __init__(self, fields: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._fields = dict(fields or {})

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record, without its end."""
        line: dict[str, object] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _plain(record.getMessage()),
            **self._fields,
        }
        if request := request_id.get():
            line["request_id"] = _plain(request)
        for name, value in vars(record).items():
            if name not in _STANDARD and not name.startswith(
                "_"
            ):  # Ray puts marks of its own on every record
                line[name] = _field(name, value)
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)[-MAX_TRACE_CHARS:]
        return json.dumps(line, ensure_ascii=True)


def setup_logging(
    *, level: str = "INFO", stream: TextIO | None = None, fields: Mapping[str, str] | None = None
) -> None:
    """Send every log of the process through one JSON handler; calling it again replaces that handler.

    Args:
        level: Name of the lowest level written.
        stream: Where to; standard error if None.
        fields: On every line, such as role and worker.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter(fields))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _field(name: str, value: object) -> object:
    if isinstance(value, bool | int | float) or value is None:
        return value
    return "(withheld)" if name.lower() in WITHHELD_FIELDS else _plain(value)


def _plain(value: object) -> object:
    if isinstance(value, str):
        return value if len(value) <= MAX_VALUE_CHARS else value[: MAX_VALUE_CHARS - 3] + "..."
    return f"({type(value).__name__})"
