"""The bytes of responses: numbered events by name, items that open, grow and close, a response object at both ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import orjson
from epdserve.services.errors import ServiceError
from epdserve.services.router.events import Delta, Ending, Kind, Message
from epdserve.services.router.http_errors import error_fields
from epdserve.services.router.responses.items import Item
from epdserve.services.router.responses.prepare import Echo
from epdserve.services.router.usage import Totals, Usage
from epdserve.services.types import PrefillResult

_KINDS: Final = {Kind.REASONING: "reasoning", Kind.CONTENT: "message"}
_PREFIXES: Final = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}
_STREAMS: Final = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
_WHOLE: Final = {"function_call": "arguments", "custom_tool_call": "input"}


class ResponsesShape:
    """Implements ``Shape``; one choice only. The recipe's own writer is the oracle of a test."""

    def __init__(self, response_id: str, echo: Echo, created: int) -> None:
        self._id = response_id
        self._echo = echo
        self._created = created
        self._items: list[Item] = []
        self._open: Item | None = None
        self._sequence = 0

    def first(self, so_far: Callable[[], Usage]) -> bytes:
        """``response.created`` and ``response.in_progress``."""
        response = self._response("in_progress")
        return self._event("response.created", {"response": response}) + self._event(
            "response.in_progress", {"response": response}
        )

    def deltas(self, choice: int, deltas: Sequence[Delta], so_far: Callable[[], Usage]) -> bytes:
        """Items that open, and their pieces."""
        events: list[bytes] = []
        for delta in deltas:
            if delta.kind is Kind.CALL:
                events += [*self._close("completed", last=False), *self._begin(self._call_item(delta))]
                continue
            if delta.kind in _KINDS and (self._open is None or self._open.kind != _KINDS[delta.kind]):
                events += [*self._close("completed"), *self._begin(self._item(_KINDS[delta.kind]))]
            assert self._open is not None
            logprobs = delta.logprobs or []
            if new := self._open.grow(delta.text, logprobs):
                events.append(self._piece(self._open, new, logprobs))
        return b"".join(events)

    def ended(self, choice: int, ending: Ending, totals: Totals | None) -> bytes:
        """What is open closes, and the response with it."""
        assert totals is not None
        status = _status(ending)
        events = self._close(status)
        name = "response.completed" if status == "completed" else "response.incomplete"
        events.append(self._event(name, {"response": self._final(status, totals)}))
        return b"".join(events)

    def failed(self, error: ServiceError) -> bytes:
        """``response.failed``, and the end; this protocol has no ``[DONE]``."""
        response = self._response("failed")
        fields = error_fields(error)
        response["error"] = {"code": fields["code"], "message": fields["message"]}
        response["output"] = self._output("incomplete")
        return self._event("response.failed", {"response": response})

    def whole(self, messages: Sequence[Message], totals: Totals) -> bytes:
        """The response object in one piece: what the stream's last event would hold."""
        message = messages[0]
        if message.reasoning:
            self._begin(self._item("reasoning"))
            self._grow(message.reasoning, [])
        if message.content:
            self._begin(self._item("message"))
            self._grow(message.content, message.content_logprobs)
        for _, call in sorted(message.calls.items()):
            self._begin(self._call_item(Delta(Kind.CALL, call.name, call_id=call.call_id)))
            self._grow("".join(call.arguments), [])
        return orjson.dumps(self._final(_status(message.ending), totals))

    def prefilled(self, prompt: int, result: PrefillResult) -> None:
        """Nothing of a prefill is shown."""

    def _grow(self, text: str, logprobs: list[dict[str, Any]]) -> None:
        assert self._open is not None
        self._open.grow(text, logprobs)

    def _item(self, kind: str) -> Item:
        index = len(self._items)
        return Item(kind, f"{_PREFIXES[kind]}_{self._id}_{index}", index)

    def _call_item(self, delta: Delta) -> Item:
        item = self._item("custom_tool_call" if delta.text in self._echo.custom else "function_call")
        item.name, item.call_id = delta.text, delta.call_id
        if (local := self._echo.namespaces.get(delta.text)) is not None:
            item.namespace, item.name = local
        return item

    def _begin(self, item: Item) -> list[bytes]:
        self._items.append(item)
        self._open = item
        fields = item.fields("in_progress", response_id=self._id)
        events = [self._event("response.output_item.added", {"item": fields, "output_index": item.index})]
        if item.kind in _WHOLE:
            return events
        part = {**self._place(item), "part": item.part(final=False)}
        return [*events, self._event("response.content_part.added", part)]

    def _piece(self, item: Item, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        fields = {**self._place(item), "delta": text}
        if item.kind == "message":
            fields["logprobs"] = logprobs
        return self._event(_STREAMS[item.kind] + ".delta", fields)

    def _close(self, status: str, *, last: bool = True) -> list[bytes]:
        """Close what is open; ``last`` if no call follows."""
        item = self._open
        if item is None:
            return []
        self._open = None
        place = self._place(item)
        done = {**place, _WHOLE.get(item.kind, "text"): item.text}
        if item.kind == "message":
            done["logprobs"] = item.logprobs
        events = [self._event(_STREAMS[item.kind] + ".done", done)]
        if item.kind not in _WHOLE:
            events.append(self._event("response.content_part.done", {**place, "part": item.part()}))
        fields = item.fields(status, response_id=self._id, last=last)
        return [
            *events,
            self._event("response.output_item.done", {"item": fields, "output_index": item.index}),
        ]

    def _place(self, item: Item) -> dict[str, Any]:
        place: dict[str, Any] = {} if item.kind in _WHOLE else {"content_index": 0}
        return {**place, "item_id": item.item_id, "output_index": item.index}

    def _response(self, status: str) -> dict[str, Any]:
        return {**self._echo.fields, "id": self._id, "created_at": self._created, "status": status}

    def _final(self, status: str, totals: Totals) -> dict[str, Any]:
        usage = totals.usage
        response = self._response(status)
        response |= {
            "completed_at": int(time.time()),
            "output": self._output(status),
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if totals.receipt is not None:
            response["epdserve"] = totals.receipt
        return response

    def _output(self, status: str) -> list[dict[str, Any]]:
        """All items; only the last one can be incomplete."""
        called = any(item.kind in _WHOLE for item in self._items)
        return [
            item.fields(
                status if item is self._items[-1] else "completed", response_id=self._id, last=not called
            )
            for item in self._items
        ]

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        body = orjson.dumps({"type": name, **fields, "sequence_number": self._sequence})
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), body)


def _status(ending: Ending) -> str:
    return "incomplete" if ending.reason == "length" else "completed"
