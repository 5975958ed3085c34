"""Who starts next: in order of arrival or of urgency, but what fits may pass what does not, and only so often."""

from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

_LOOK_AHEAD: Final = 16  # requests that are tried in one step


class WaitingQueue(Generic[T]):
    """Requests without a place. Owned by the step loop; ``len`` and ``oldest`` may be asked from other threads.

    Args:
        max_overtakes: How many later requests may start before one that was tried and did not fit. After that nothing
            starts before it does, so that places come free for it.
    """

    def __init__(self, *, max_overtakes: int) -> None:
        self._max_overtakes = max_overtakes
        self._overtaken: dict[T, int] = {}  # in order of arrival

    def __len__(self) -> int:
        return len(self._overtaken)

    def __iter__(self) -> Iterator[T]:
        return iter(self._overtaken)

    def __contains__(self, task: object) -> bool:
        return task in self._overtaken

    def oldest(self) -> T | None:
        """The one that waits longest."""
        try:
            return next(iter(self._overtaken), None)
        except RuntimeError:  # it changed while another thread looked
            return None

    def append(self, task: T) -> None:
        """Add one behind all others."""
        self._overtaken[task] = 0

    def remove(self, task: T) -> None:
        """Take one out."""
        del self._overtaken[task]

    def clear(self) -> None:
        """Take all out."""
        self._overtaken.clear()

    def start(
        self,
        *,
        ready: Callable[[T], bool],
        try_start: Callable[[T], bool],
        order: Callable[[T], Any] | None = None,
    ) -> list[T]:
        """Start what can be started; those are taken out.

        Args:
            ready: Whether a request may start at all yet; one that may not is passed freely.
            try_start: Gives it its place; False if there is no room.
            order: What requests are sorted by; None = as they arrived. Those passed too often come first in any case.
        """
        started: list[T] = []
        blocked: list[T] = []
        tried = 0
        for task in self._in_order(order):
            if not ready(task):
                continue
            if tried == _LOOK_AHEAD:
                break
            tried += 1
            if try_start(task):
                del self._overtaken[task]
                started.append(task)
                for waiting in blocked:
                    self._overtaken[waiting] += 1
            else:
                blocked.append(task)
            if any(self._overtaken[waiting] >= self._max_overtakes for waiting in blocked):
                break
        return started

    def _in_order(self, order: Callable[[T], Any] | None) -> list[T]:
        if order is None:
            return list(self._overtaken)
        return sorted(
            self._overtaken, key=lambda task: (self._overtaken[task] < self._max_overtakes, order(task))
        )
