"""The door: a bounded number of requests and prompt tokens is inside at any time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from epdserve.services.errors import Overloaded
from epdserve.services.policy.admission import AdmissionLimits, AdmissionLoad, retry_after_s

_NEWEST_WEIGHT: Final = 0.1


class Admission:
    """Counts what is inside and remembers how long requests stay. Owned by the event loop.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, limits: AdmissionLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._requests = 0
        self._tokens = 0
        self._mean_stay_s = 0.0

    @property
    def load(self) -> AdmissionLoad:
        """What is inside now."""
        return AdmissionLoad(self._requests, self._tokens, self._mean_stay_s)

    def refuse_if_full(self, prompt_tokens: int = 0) -> None:
        """Refuse work that could not enter now, before anything is spent on it.

        Raises:
            Overloaded: No room; ``retry_after_s`` says when there may be some.
        """
        wait_s = retry_after_s(self.load, self._limits, prompt_tokens=prompt_tokens)
        if wait_s is not None:
            message = f"{self._requests} requests are in flight, the router takes no more"
            raise Overloaded(message, retry_after_s=wait_s)

    def enter(self, prompt_tokens: int) -> Admitted:
        """Be inside until the block ends.

        Raises:
            Overloaded: As ``refuse_if_full``.
        """
        self.refuse_if_full(prompt_tokens)
        self._requests += 1
        self._tokens += prompt_tokens
        return Admitted(self, prompt_tokens, self._clock())

    def leave(self, prompt_tokens: int, entered_at: float) -> None:
        """One that has entered is out again."""
        self._requests -= 1
        self._tokens -= prompt_tokens
        stay_s = self._clock() - entered_at
        old = self._mean_stay_s or stay_s
        self._mean_stay_s = old + _NEWEST_WEIGHT * (stay_s - old)


class Admitted:
    """One request inside, as a context."""

    __slots__ = ("_admission", "_entered_at", "_prompt_tokens")

    def __init__(self, admission: Admission, prompt_tokens: int, entered_at: float) -> None:
        self._admission, self._prompt_tokens, self._entered_at = admission, prompt_tokens, entered_at

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._admission.leave(self._prompt_tokens, self._entered_at)


class ByteBudget:
    """Bytes of bodies that may be held at one time, over all requests. Owned by the event loop."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0

    def share(self) -> ByteShare:
        """One request's part; given back when the block ends."""
        return ByteShare(self)

    def take(self, nbytes: int) -> None:
        """Hold more.

        Raises:
            Overloaded: The budget is spent.
        """
        if self.held_bytes + nbytes > self._limit_bytes:
            raise Overloaded("too many large requests at once", retry_after_s=1.0)
        self.held_bytes += nbytes


class ByteShare:
    """What one request holds of a ``ByteBudget``, as a context."""

    __slots__ = ("_budget", "nbytes")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.nbytes = 0

    def __enter__(self) -> ByteShare:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.held_bytes -= self.nbytes

    def take(self, nbytes: int) -> None:
        """Hold more. Raises as ``ByteBudget.take``."""
        self._budget.take(nbytes)
        self.nbytes += nbytes
