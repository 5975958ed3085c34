"""Order in which experts meet their rows, and the tiles in which they do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from epdserve.kernels.linear.tile import Tile
from torch import Tensor

FEW_ROWS: Final = Tile(n=64, t=16, k=128, warps=4, stages=4)  # decode: a few rows an expert
MANY_ROWS: Final = Tile(n=128, t=64, k=128, warps=8, stages=3)  # prefill
MANY: Final = 32  # rows an expert on average, from which the large tile is used


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """Pairs (token, choice), numbered token * k + choice, in the order of their experts.

    Attributes:
        order_P: (P,) int32, the pair at each place.
        place_P: (P,) int32, the place of each pair.
        tiles: (most tiles, 3) int32: expert, first place, number of places; expert -1 = no tile.
        top_k: Choices of a token.
        tile_rows: Places of a tile at most.
    """

    order_P: Tensor
    place_P: Tensor
    tiles: Tensor
    top_k: int
    tile_rows: int


def expert_tile(pairs: int, num_experts: int) -> Tile:
    """Tile of both products of a step with so many (token, choice) pairs."""
    return MANY_ROWS if pairs >= MANY * num_experts else FEW_ROWS


def tile_of(plan: ExpertPlan) -> Tile:
    """The tile whose rows a plan was made for."""
    return MANY_ROWS if plan.tile_rows == MANY_ROWS.t else FEW_ROWS
