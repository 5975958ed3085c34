"""Sizes of the checks: the released model's (spec/backbone.md 1.1), and tiny ones for a dry run on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Kind(Enum):
    """What a layer does beyond its window; the value is how many of the 40 layers do it."""

    WINDOW = "window", 2
    FULL_PAIRS = "ratio 2, full", 3
    REUSE_PAIRS = "ratio 2, reuse", 15
    FULL = "ratio 1, full", 1
    REINDEX = "ratio 1, candidates", 4
    REUSE = "ratio 1, reuse", 15

    @property
    def ratio(self) -> int:
        """Tokens of an entry; 0 without entries."""
        return {"window": 0, "ratio 2": 2, "ratio 1": 1}[self.value[0].partition(",")[0]]


@dataclass(frozen=True, slots=True)
class Shapes:
    """The model, and the sizes of the calls that are checked and timed."""

    hidden: int
    vocabulary: int
    inner: int  # of an expert
    experts: int
    top_experts: int
    heads: int
    latent: int
    rotary: int
    q_rank: int
    o_rank: int
    o_groups: int
    index_heads: int
    index_dim: int
    top_entries: int
    pool_blocks: int
    pool_block: int
    window: int
    entries_per_page: int
    copies: int
    prefill_rows: int
    decode_rows: tuple[int, ...]
    contexts: tuple[int, ...]  # tokens
    checked_rows: int  # compared with the reference
    layers_below: int  # the replay cut
    layers_above: int
    decode_kinds: tuple[Kind, ...]
    prefill_kinds: tuple[Kind, ...]


RELEASED: Final = Shapes(
    hidden=5120, vocabulary=129_280, inner=2304, experts=384, top_experts=6, heads=64, latent=512, rotary=64,
    q_rank=1280, o_rank=1024, o_groups=8, index_heads=32, index_dim=128, top_entries=512, pool_blocks=2048,
    pool_block=8, window=128, entries_per_page=128, copies=4, prefill_rows=8192, decode_rows=(1, 32, 128),
    contexts=(8 << 10, 128 << 10, 1 << 20), checked_rows=32, layers_below=20, layers_above=20,
    decode_kinds=tuple(Kind), prefill_kinds=tuple(Kind),
)  # fmt: skip
TINY: Final = Shapes(
    hidden=64, vocabulary=96, inner=32, experts=4, top_experts=2, heads=16, latent=64, rotary=16, q_rank=32, o_rank=32,
    o_groups=2, index_heads=16, index_dim=32, top_entries=8, pool_blocks=3, pool_block=4, window=8,
    entries_per_page=4, copies=4, prefill_rows=2, decode_rows=(2,), contexts=(24,), checked_rows=2,
    layers_below=0, layers_above=1, decode_kinds=(Kind.FULL, Kind.REINDEX), prefill_kinds=(),
)  # fmt: skip
