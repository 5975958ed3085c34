"""Stop strings across pieces of text: no part of a match is let out, and nothing is held longer than it must be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from epdserve.services.router.events import Delta, join


class StopMatcher:
    """Finds the stop string that is complete first; of several complete at one character, the longest.

    The result does not depend on how the text was cut into pieces. At most the longest stop less one character is
    held back.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """Take the stop strings, none of them empty; ``include`` lets a matched one out as well."""
        self._stops: Final = tuple(stops)
        self._starts: Final = frozenset(stop[0] for stop in stops)
        self._most_held: Final = max(map(len, stops), default=1) - 1
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that may leave, and the stop string that ended it."""
        text = self._held + text
        found = min(
            ((at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=None
        )
        if found is not None:
            end, start, stop = found
            self._held = ""
            return text[: end if self._include else start], stop
        keep = self._could_begin(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _could_begin(self, text: str) -> int:
        """Length of the longest end of the text that a stop string may begin with."""
        for start in range(max(0, len(text) - self._most_held), len(text)):
            if text[start] in self._starts:
                end = text[start:]
                if any(stop.startswith(end) for stop in self._stops):
                    return len(end)
        return 0


class StopFilter:
    """A ``StopMatcher`` over deltas of one kind; log-probabilities go with the last character of their token."""

    def __init__(self, matcher: StopMatcher) -> None:
        self._matcher = matcher
        self._waiting: list[tuple[int, list[dict[str, Any]]]] = []
        self._like: Delta | None = None

    def push(self, delta: Delta, deltas: list[Delta]) -> str | None:
        """Append to ``deltas`` what may leave; the stop string that was found."""
        self._like = delta
        if delta.logprobs is not None:
            self._waiting.append((len(delta.text), delta.logprobs))
        text, found = self._matcher.push(delta.text)
        self._let_out(text, deltas)
        return found

    def flush(self, deltas: list[Delta]) -> None:
        """Append what was held back."""
        self._let_out(self._matcher.flush(), deltas)

    def _let_out(self, text: str, deltas: list[Delta]) -> None:
        if not text or self._like is None:
            return
        entries: list[dict[str, Any]] | None = None
        left = len(text)
        while self._waiting and self._waiting[0][0] <= left:
            length, more = self._waiting.pop(0)
            left -= length
            entries = [*(entries or ()), *more]
        if self._waiting and left:
            length, more = self._waiting[0]
            self._waiting[0] = (length - left, more)
        join(Delta(self._like.kind, text, self._like.index, logprobs=entries), deltas)
