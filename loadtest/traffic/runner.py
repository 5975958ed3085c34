"""Sends sessions at their times. Open loop over sessions: a slow server does not slow the customers down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from epdserve.loadtest.client import Outcome, new_client, stream_chat
from epdserve.loadtest.results.record import Ending, Record, ending_of, facts_of
from epdserve.loadtest.traffic.sessions import Session, Turn, answered, usual_fields

_GOING_S = 5.0


@dataclass(slots=True)
class Tally:
    """What is going on, for whoever shows it."""

    sessions: int
    begun: int = 0
    ended: int = 0
    in_flight: int = 0


Watch = Callable[[Tally, Record | None], None]


def _nobody(tally: Tally, record: Record | None) -> None:
    return


class Runner:
    """Sends sessions and keeps a record of each request. Owned by one event loop.

    Args:
        url: Base address, without ``/v1``.
        keys: One a tenant; None = no key.
        plain: Send only what every OpenAI-compatible server takes.
        watch: Told whenever a request begins or ends.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        keys: Sequence[str | None] = (None,),
        plain: bool = False,
        silence_s: float = 300.0,
        connections: int = 4096,
        watch: Watch = _nobody,
    ) -> None:
        self._url, self._model, self._keys, self._plain = url, model, keys, plain
        self._silence_s, self._connections, self._watch = silence_s, connections, watch
        self._records: list[Record] = []
        self._tally = Tally(0)
        self._started_at = 0.0

    async def run(self, sessions: Sequence[Session]) -> list[Record]:
        """All records, in order of sending."""
        self._records, self._tally = [], Tally(len(sessions))
        clients = [self._client(key) for key in self._keys]
        try:
            self._started_at = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for session in sessions:
                    group.create_task(self._serve(clients[session.tenant % len(clients)], session))
        finally:
            for client in clients:
                await client.aclose()
        return sorted(self._records, key=lambda record: record.at_s)

    def _client(self, key: str | None) -> httpx.AsyncClient:
        return new_client(self._url, api_key=key, silence_s=self._silence_s, connections=self._connections)

    async def _serve(self, client: httpx.AsyncClient, session: Session) -> None:
        due_at = self._started_at + session.at_s
        await asyncio.sleep(max(0.0, due_at - time.monotonic()))
        self._tally.begun += 1
        history: list[dict[str, Any]] = []
        for number, turn in enumerate(session.turns):
            if number:
                due_at = time.monotonic() + turn.think_s
                await asyncio.sleep(turn.think_s)
            history += [dict(message) for message in turn.messages]
            outcome, left = await self._ask(client, history, turn)
            record = self._record(session, number, turn, outcome, left, due_at)
            self._records.append(record)
            self._watch(self._tally, record)
            if not record.ok:
                break  # nobody goes on after an answer that is not there
            history += answered(outcome.content, outcome.tool_calls)
        self._tally.ended += 1
        self._watch(self._tally, None)

    async def _ask(
        self, client: httpx.AsyncClient, history: list[dict[str, Any]], turn: Turn
    ) -> tuple[Outcome, bool]:
        fields = usual_fields(turn, plain=self._plain)
        body = {"model": self._model, "messages": list(history), **fields}
        outcome = Outcome(sent_at=time.monotonic())
        self._tally.in_flight += 1
        self._watch(self._tally, None)
        try:
            asking = asyncio.create_task(stream_chat(client, body, outcome, receipt=not self._plain))
            await asyncio.wait([asking], timeout=turn.leave_after_s)
            left = not asking.done()
            if left:
                asking.cancel()
                await asyncio.wait([asking], timeout=_GOING_S)
                outcome.ended_at = time.monotonic()
            return outcome, left
        finally:
            self._tally.in_flight -= 1

    def _record(
        self, session: Session, number: int, turn: Turn, outcome: Outcome, left: bool, due_at: float
    ) -> Record:
        ending = ending_of(outcome, left=left)
        expected = ending is Ending.OK or ending is Ending.LEFT
        if turn.refusal_expected:
            expected = 400 <= outcome.status < 500
        return Record(
            kind=session.kind,
            tenant=session.tenant % len(self._keys),
            turn=number,
            at_s=outcome.sent_at - self._started_at,
            late_s=max(0.0, outcome.sent_at - due_at),
            ending=ending,
            expected=expected,
            wanted_prompt=turn.prompt_tokens,
            wanted_answer=turn.max_tokens if turn.exact_answer and not self._plain else None,
            **facts_of(outcome),
        )
