"""Which prefill and which decode worker takes a request. Loads are counted in tokens, not in requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """What a prefill worker has before it.

    Attributes:
        queued_tokens: Prompt tokens waiting or running there.
        hit_tokens: Leading tokens of this prompt whose KV it holds.
    """

    worker: str
    queued_tokens: int
    hit_tokens: int

    def __post_init__(self) -> None:
        if self.queued_tokens < 0 or self.hit_tokens < 0:
            raise ValueError(f"negative load: {self}")


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
    """Worker that would finish first: queued work plus the part of the prompt it does not hold.

    At least one token is always computed, so a full hit still costs one.

    Raises:
        ValueError: No candidates.
    """
    if not loads:
        raise ValueError("no prefill worker to choose from")

    def cost(load: PrefillLoad) -> tuple[int, str]:
        return load.queued_tokens + max(1, prompt_tokens - load.hit_tokens), load.worker

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
