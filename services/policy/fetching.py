"""Fetch or recompute: what the time of either is expected to be, from what was measured lately."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

UNKNOWN: Final = 0.0


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measured lately; ``UNKNOWN`` (0) is what was not, and then fetching is tried, so that it becomes known.

    Attributes:
        prefill_tokens_per_s: Of this worker.
        bytes_per_s: By tier, from asking for blocks to having them verified.
        latency_s: Of one fetch, before its first byte.
    """

    prefill_tokens_per_s: float
    bytes_per_s: Mapping[str, float]
    latency_s: float = 0.0

    def compute_s(self, tokens: int) -> float:
        """Seconds to compute tokens; infinite if the speed is not known."""
        if not tokens:
            return 0.0
        return tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else float("inf")

    def fetch_s(self, tier: str, nbytes: int) -> float:
        """Seconds to bring bytes up from a tier, without the latency; 0 if the speed is not known."""
        speed = self.bytes_per_s.get(tier, UNKNOWN)
        return nbytes / speed if speed else 0.0


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks of a prompt: so many are held here, the next ones lie in ``runs`` of (tier, blocks), in order."""

    held_blocks: int
    runs: Sequence[tuple[str, int]]
    block_tokens: int
    block_bytes: int


def blocks_to_fetch(chain: Chain, speeds: Speeds, *, prompt_tokens: int, rerun_tokens: int) -> int:
    """How many of the blocks after those held are worth fetching: the shortest expected time, most blocks on a tie.

    Args:
        chain: Where the prompt's blocks are.
        speeds: Of both ways.
        prompt_tokens: All of them are computed but for the hit.
        rerun_tokens: Rows run again before a hit: a window, or a halo. A hit that is not longer counts as none.
    """

    def rows(blocks: int) -> int:
        hit = min(blocks * chain.block_tokens, prompt_tokens - 1)
        return prompt_tokens - (hit - rerun_tokens if hit > rerun_tokens else 0)

    best, best_s = 0, speeds.compute_s(rows(chain.held_blocks))
    fetched, fetch_s = 0, speeds.latency_s
    for tier, blocks in chain.runs:
        fetched += blocks
        fetch_s += speeds.fetch_s(tier, blocks * chain.block_bytes)
        total = chain.held_blocks + fetched
        whole_s = fetch_s + speeds.compute_s(rows(total))
        if rows(total) < rows(chain.held_blocks) and whole_s <= best_s:
            best, best_s = fetched, whole_s
    return best


def tail_is_worth_it(speeds: Speeds, *, tail_bytes: int, saved_tokens: int) -> bool:
    """Whether a tail in the machine's store is fetched sooner than the rows it saves are run."""
    fetch_s = speeds.latency_s + speeds.fetch_s("host", tail_bytes)
    return saved_tokens > 0 and fetch_s <= speeds.compute_s(saved_tokens)
