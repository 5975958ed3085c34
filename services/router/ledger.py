"""What routers have in flight, by worker, in tokens: fresher than any heartbeat."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from epdserve.services.policy.pools import Floats, Indices
from epdserve.services.router.worker_rows import WorkerRows

_REQUESTS, _TOKENS, _OUTPUT = range(3)
_FIELDS: Final = 3


@dataclass(slots=True)
class InFlight:
    """At one worker.

    Attributes:
        tokens: Sent and not seen finished.
        output_tokens: Of these, output that is expected; only requests that decode have some.
    """

    requests: int = 0
    tokens: int = 0
    output_tokens: float = 0.0


_NOTHING: Final = InFlight()


class InFlightLedger:
    """What this router has sent to workers and not seen finished, and what other routers say of theirs.

    A worker's heartbeat counts all routers but is old; this counts one router exactly, and the others as of their last
    word. Placement takes the greater of heartbeat and ledger. Owned by the event loop.

    Attributes:
        alone: No other router is known of; then nothing is stale.
    """

    def __init__(self) -> None:
        self._own: dict[str, InFlight] = {}
        self._others: dict[str, InFlight] = {}
        self._table = WorkerRows(_FIELDS)  # the sums of both, for placement
        self._stale: set[str] = set()  # whose sums are to be made again before somebody looks
        self.alone = True

    def tokens(self, worker: str) -> int:
        """Tokens in flight at a worker."""
        return self._own.get(worker, _NOTHING).tokens + self._others.get(worker, _NOTHING).tokens

    def requests(self, worker: str) -> int:
        """Requests in flight at a worker."""
        return self._own.get(worker, _NOTHING).requests + self._others.get(worker, _NOTHING).requests

    def output_tokens(self, worker: str) -> float:
        """Output that requests in flight at a worker were expected to make when they were sent."""
        mine, theirs = self._own.get(worker, _NOTHING), self._others.get(worker, _NOTHING)
        return mine.output_tokens + theirs.output_tokens

    @property
    def own(self) -> Mapping[str, InFlight]:
        """This router's part."""
        return self._own

    @property
    def layout(self) -> int:
        """Changes when the numbers of ``rows`` do."""
        return self._table.layout

    def rows(self, workers: Collection[str]) -> Indices:
        """Numbers by which ``in_flight`` knows these workers, while ``layout`` is what it is."""
        return self._table.rows(workers)

    def in_flight(self, rows: Indices) -> tuple[Floats, Floats, Floats]:
        """Requests, tokens and expected output of workers: what ``requests``, ``tokens``, ``output_tokens`` tell."""
        while self._stale:
            self._sum_up(self._stale.pop())
        found = self._table.values.take(rows, axis=1)
        return found[_REQUESTS], found[_TOKENS], found[_OUTPUT]

    def keep(self, workers: Collection[str]) -> None:
        """Forget workers that are not among those alive, once they have become many."""
        self._table.keep({*workers, *self._own, *self._others})
        self._stale &= {*workers, *self._own, *self._others}

    def hear(self, others: Mapping[str, InFlight], *, routers: int) -> None:
        """Take what ``routers`` other routers have in flight, all together, in place of what was heard before."""
        gone, self._others = self._others.keys() - others.keys(), dict(others)
        self.alone = not routers
        self._stale.update(gone, others)

    def hold(self, worker: str, tokens: int, *, output_tokens: float = 0.0) -> Held:
        """Count tokens at a worker until the block ends."""
        return Held(self, worker, tokens, output_tokens)

    def add(self, worker: str, requests: int, tokens: int, output_tokens: float) -> None:
        """Count more at a worker, or less."""
        row = self._own.get(worker)
        if row is None:
            row = self._own[worker] = InFlight()
        row.requests += requests
        row.tokens += tokens
        row.output_tokens += output_tokens
        if not row.requests:
            # Names of dead workers must not pile up
            del self._own[worker]
        self._stale.add(worker)

    def _sum_up(self, worker: str) -> None:
        mine, theirs = self._own.get(worker, _NOTHING), self._others.get(worker, _NOTHING)
        self._table.of(worker)[:] = (
            mine.requests + theirs.requests,
            mine.tokens + theirs.tokens,
            mine.output_tokens + theirs.output_tokens,
        )


class Held:
    """What one request holds at a worker, as a context."""

    __slots__ = ("_ledger", "_output_tokens", "_tokens", "_worker")

    def __init__(self, ledger: InFlightLedger, worker: str, tokens: int, output_tokens: float) -> None:
        self._ledger, self._worker = ledger, worker
        self._tokens, self._output_tokens = tokens, output_tokens

    def __enter__(self) -> None:
        self._ledger.add(self._worker, 1, self._tokens, self._output_tokens)

    def __exit__(self, *_: object) -> None:
        self._ledger.add(self._worker, -1, -self._tokens, -self._output_tokens)
