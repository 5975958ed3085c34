"""Output of one router's requests until the router has acknowledged it. Pure state, no I/O.

Not chunks but tokens are kept: whatever has not been sent when the stream can be written goes out as one
chunk a request. A stream that falls behind therefore grows no queue of frames, and a replay is nothing but a
step back of the mark up to which output counts as sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from epdserve.services.sampling import TokenLogprob
from epdserve.services.types import TokenChunk


@dataclass(slots=True)
class Entry:
    """One request's output.

    Attributes:
        base: Offset of ``tokens[0]``: everything before it is acknowledged.
        sent: Offset up to which tokens count as sent.
        logprobs: One for each of ``tokens``, or none at all.
        final: The last chunk (its tokens stand in ``tokens`` already), None while there is more to come.
        final_sent: Whether the end counts as sent.
        ended_at: When the last chunk came, on the owner's clock.
    """

    base: int
    sent: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    final: TokenChunk | None = None
    final_sent: bool = False
    ended_at: float = 0.0

    @property
    def end(self) -> int:
        """Offset of the next token."""
        return self.base + len(self.tokens)


class Outbox:
    """Unacknowledged output by request. Owned by the event loop; not thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._unsent: dict[str, None] = {}  # an ordered set
        self._kept_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    @property
    def kept_tokens(self) -> int:
        """Tokens kept for replay."""
        return self._kept_tokens

    def live(self) -> list[str]:
        """Requests whose last chunk has not come."""
        return [name for name, entry in list(self._entries.items()) if entry.final is None]

    def is_live(self, request_id: str) -> bool:
        """Whether the request is here and its last chunk has not come."""
        entry = self._entries.get(request_id)
        return entry is not None and entry.final is None

    def unacknowledged(self, request_id: str) -> int:
        """Tokens kept of one request."""
        return len(self._entries[request_id].tokens)

    def open(self, request_id: str, *, offset: int) -> None:
        """Expect output of a request from ``offset`` on."""
        assert request_id not in self._entries, f"{request_id} opened twice"
        self._entries[request_id] = Entry(base=offset, sent=offset)

    def append(self, chunk: TokenChunk, *, now: float) -> bool:
        """Keep new output.

        Returns:
            False if the chunk does not continue the request's output: unknown, ended, or at another offset.
        """
        entry = self._entries.get(chunk.request_id)
        if entry is None or entry.final is not None or chunk.offset != entry.end:
            return False
        entry.tokens.extend(chunk.tokens)
        entry.logprobs.extend(chunk.logprobs)
        self._kept_tokens += len(chunk.tokens)
        if chunk.final:
            entry.final, entry.ended_at = chunk, now
        self._unsent[chunk.request_id] = None
        return True

    def end(self, request_id: str) -> int:
        """Offset at which the request's output goes on."""
        return self._entries[request_id].end

    def acknowledge(self, request_id: str, offset: int, *, final: bool) -> bool:
        """Forget what the router holds.

        Returns:
            True if the request is done with and forgotten altogether.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        # never forget what was not produced, whatever the router says
        drop = max(0, min(offset, entry.end) - entry.base)
        if drop:
            del entry.tokens[:drop]
            del entry.logprobs[:drop]
            entry.base += drop
            entry.sent = max(entry.sent, entry.base)
            self._kept_tokens -= drop
        if final and entry.final is not None and not entry.tokens:
            self.forget(request_id)
            return True
        return False

    def rewind(self, request_id: str, offset: int) -> bool:
        """Send again from ``offset`` on.

        Returns:
            False if that output is not here (any more).
        """
        entry = self._entries.get(request_id)
        if entry is None or not entry.base <= offset <= entry.end:
            return False
        entry.sent, entry.final_sent = offset, False
        if entry.tokens or entry.final is not None:
            self._unsent[request_id] = None
        return True

    def take(self) -> list[TokenChunk]:
        """Everything unsent, one chunk a request; from here on it counts as sent."""
        chunks = []
        for request_id in self._unsent:
            entry = self._entries[request_id]
            unsent = slice(entry.sent - entry.base, None)
            tokens, logprobs = tuple(entry.tokens[unsent]), tuple(entry.logprobs[unsent])
            final = entry.final if not entry.final_sent else None
            if not tokens and final is None:
                continue
            chunk = TokenChunk(request_id, entry.sent, tokens, logprobs=logprobs)
            if final is not None:
                chunk = replace(final, offset=entry.sent, tokens=tokens, logprobs=logprobs)
                entry.final_sent = True
            chunks.append(chunk)
            entry.sent = entry.end
        self._unsent.clear()
        return chunks

    def forget(self, request_id: str) -> None:
        """Drop a request and its output."""
        entry = self._entries.pop(request_id, None)
        self._unsent.pop(request_id, None)
        if entry is not None:
            self._kept_tokens -= len(entry.tokens)

    def oldest_end(self) -> float | None:
        """When the oldest unacknowledged end came, None if there is none."""
        # a copy: metrics are read from another thread
        ends = [entry.ended_at for entry in list(self._entries.values()) if entry.final is not None]
        return min(ends, default=None)

    def ended_before(self, moment: float) -> list[str]:
        """Requests whose last chunk came before ``moment`` and still waits for its acknowledgement."""
        return [
            name
            for name, entry in self._entries.items()
            if entry.final is not None and entry.ended_at < moment
        ]
