"""What this router has in flight, by worker, in tokens: fresher than any heartbeat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class InFlightLedger:
    """Tokens this router has sent to workers and not seen finished. Owned by the event loop.

    A worker's heartbeat counts all routers but is old; this counts one router but is exact. Placement takes the
    greater of the two, which is right for one router and a bound for several.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._requests: dict[str, int] = {}

    def tokens(self, worker: str) -> int:
        """Tokens in flight at a worker."""
        return self._tokens.get(worker, 0)

    def requests(self, worker: str) -> int:
        """Requests in flight at a worker."""
        return self._requests.get(worker, 0)

    @contextmanager
    def hold(self, worker: str, tokens: int) -> Iterator[None]:
        """Count tokens at a worker until the block ends."""
        self._tokens[worker] = self._tokens.get(worker, 0) + tokens
        self._requests[worker] = self._requests.get(worker, 0) + 1
        try:
            yield
        finally:
            self._tokens[worker] -= tokens
            self._requests[worker] -= 1
            if not self._requests[worker]:
                # Names of dead workers must not pile up
                del self._tokens[worker], self._requests[worker]
