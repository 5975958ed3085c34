"""Requests by the moment at which nobody waits for them any more."""

import heapq

from epdserve.services.decode.task import DecodeTask


class Deadlines:
    """A heap that forgets what has ended when its time comes, or when that is most of it. Owned by the step loop."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, DecodeTask]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, task: DecodeTask) -> None:
        """Watch a task, if it has a deadline."""
        if task.deadline_at is None:
            return
        if len(self._heap) > 64 and 2 * sum(task.ended for _, _, task in self._heap) > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[2].ended]
            heapq.heapify(self._heap)
        self._added += 1
        heapq.heappush(self._heap, (task.deadline_at, self._added, task))

    def expired(self, now: float) -> list[DecodeTask]:
        """Tasks whose time is over; they are told once."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            task = heapq.heappop(self._heap)[2]
            if not task.ended:
                found.append(task)
        return found
