"""Which prefill and which decode worker takes a request. Loads are counted in tokens, not in requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# What bringing a token's KV up from the machine's store costs, in tokens computed: it overlaps with computing others
FETCH_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """What a prefill worker has before it.

    Attributes:
        queued_tokens: Prompt tokens waiting or running there.
        hit_tokens: Leading tokens of this prompt whose KV it holds.
        stored_tokens: Leading tokens whose KV the store of its machine holds.
    """

    worker: str
    queued_tokens: int
    hit_tokens: int
    stored_tokens: int = 0

    def __post_init__(self) -> None:
        if self.queued_tokens < 0 or self.hit_tokens < 0 or self.stored_tokens < 0:
            raise ValueError(f"negative load: {self}")

    @property
    def reach_tokens(self) -> int:
        """Leading tokens that it need not compute."""
        return max(self.hit_tokens, self.stored_tokens)


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """How full a decode worker is.

    Attributes:
        used_tokens: Tokens whose KV running requests hold there.
        total_tokens: Tokens its pages hold in all.
        running: Requests in its step loop.
    """

    worker: str
    used_tokens: int
    total_tokens: int
    running: int

    def __post_init__(self) -> None:
        if self.used_tokens < 0 or self.total_tokens <= 0 or self.running < 0:
            raise ValueError(f"impossible load: {self}")


def choose_prefill(loads: Sequence[PrefillLoad], *, prompt_tokens: int) -> str:
    """Worker that would finish first: queued work plus the part of the prompt that is not to be had there.

    At least one token is always computed, so a full hit still costs one. What its machine's store holds has to be
    brought up, so that of two workers beside the same store the one that holds more itself is taken.

    Raises:
        ValueError: No candidates.
    """
    if not loads:
        raise ValueError("no prefill worker to choose from")

    def cost(load: PrefillLoad) -> tuple[float, str]:
        computed = max(1, prompt_tokens - load.reach_tokens)
        fetched = FETCH_SHARE * (load.reach_tokens - load.hit_tokens)
        return load.queued_tokens + computed + fetched, load.worker

    return min(loads, key=cost).worker


def choose_decode(loads: Sequence[DecodeLoad], *, needed_tokens: int) -> str:
    """Worker that would be least full with this request in it; one where it does not fit now comes last.

    Fullness rather than free tokens, because workers of one pool may differ in size; then the shorter step
    loop.

    Args:
        needed_tokens: Prompt tokens plus those the answer is expected to take.

    Raises:
        ValueError: No candidates.
    """
    if not loads:
        raise ValueError("no decode worker to choose from")

    def cost(load: DecodeLoad) -> tuple[bool, float, int, str]:
        after = load.used_tokens + needed_tokens
        return after > load.total_tokens, after / load.total_tokens, load.running, load.worker

    return min(loads, key=cost).worker
