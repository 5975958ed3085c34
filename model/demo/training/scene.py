"""What the layers of one training forward share. B = sequences, T = tokens of each, E = entries, W = window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from epdserve.kernels.quant import round_fp4_e4m3, round_fp4_e8m0, round_fp8
from epdserve.kernels.rope import YarnScaling, rope_frequencies
from epdserve.model.config import TextConfig
from torch import Tensor

FAR = -1e30  # score of what is not seen; finite, so that a row that sees nothing has gradients


@dataclass(frozen=True, slots=True)
class Setting:
    """Which approximations a forward makes.

    Attributes:
        rounds_cache: Window rows, entries and index keys are rounded as the caches store them.
        selects: Attention sees what the indexer picks; else every visible entry.
        teaches_indexer: Gather what the indexer is taught from.
    """

    rounds_cache: bool = False
    selects: bool = False
    teaches_indexer: bool = False


@dataclass(slots=True)
class Lesson:
    """What one index source should learn: the attention mass of the layers that use its picks."""

    scores_BTE: Tensor
    allowed_BTE: Tensor
    mass_BTE: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class Entries:
    """One cache: entries and index keys, and which of them each row sees."""

    main_BED: Tensor
    keys_BEI: Tensor | None
    visible_TE: Tensor
    bias_BTE: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.bias_BTE = as_bias(self.visible_TE)[None]


def as_bias(seen: Tensor) -> Tensor:
    """What is added to scores: nothing where ``seen``, else so much that no weight is left."""
    return torch.zeros(seen.shape).masked_fill_(~seen, FAR)


class Scene:
    """Rotations, masks and caches of a batch of sequences.

    Args:
        ids_BT: Token ids; T is a multiple of the window.
        positions_BT: Positions for the rotations, (1, T) or (B, T). Gaps move rotations only, never a window.
        floors: Two (B, T) window floors, up to the cut and above it, as bounded replay leaves them.
    """

    def __init__(
        self,
        text: TextConfig,
        ids_BT: Tensor,
        setting: Setting,
        positions_BT: Tensor | None = None,
        floors: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        self.ids_BT, self.setting, self.floors = ids_BT, setting, floors
        self.sequences, self.length = ids_BT.shape
        self.window = text.sliding_window
        if self.length % self.window:
            raise ValueError(f"{self.length} tokens are no multiple of the window of {self.window}")
        positions = torch.arange(self.length)[None] if positions_BT is None else positions_BT
        scaling = text.rope_scaling
        yarn = YarnScaling(
            scaling.factor, scaling.original_max_position_embeddings, scaling.beta_fast, scaling.beta_slow
        )
        rotary = text.qk_rope_head_dim
        self.near_turn = _turns(positions, rope_frequencies(rotary, text.rope_theta, None))
        self.far_turn = _turns(positions, rope_frequencies(rotary, text.compress_rope_theta, yarn))
        self.row_T = torch.arange(self.length)
        self.key_rows_TW, self.in_window_TW = self._window()
        self.caches: dict[int, Entries] = {}
        self.picked_BTE: dict[int, Tensor | None] = {}
        self.candidates_BTE: Tensor | None = None
        self.lessons: dict[int, Lesson] = {}
        self._window_bias: dict[bool, Tensor] = {}

    def _window(self) -> tuple[Tensor, Tensor]:
        """Rows of the own and the previous stretch of W rows for each row, and which are in its window."""
        width = self.window
        start = (self.row_T // width - 1) * width
        keys = start[:, None] + torch.arange(2 * width)
        distance = self.row_T[:, None] - keys
        return keys, (distance >= 0) & (distance < width) & (keys >= 0)

    def window_bias(self, *, above_cut: bool) -> Tensor:
        """(B or 1, T, 2W), added to the scores of window rows."""
        if above_cut not in self._window_bias:
            floor_BT = self.floors[above_cut]
            mask = self.in_window_TW[None]
            if floor_BT is not None:
                mask = mask & (self.key_rows_TW >= floor_BT[..., None])
            self._window_bias[above_cut] = as_bias(mask)
        return self._window_bias[above_cut]

    def rounder(self, kind: str) -> Callable[[Tensor], Tensor] | None:
        """How ``window``, ``main`` or ``index`` values are rounded; None if they are not."""
        return _ROUNDERS[kind] if self.setting.rounds_cache else None


_ROUNDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "window": round_fp8,
    "main": round_fp4_e4m3,
    "index": round_fp4_e8m0,
}


def _turns(positions_BT: Tensor, inverse_frequency: Tensor) -> Tensor:
    """(B, T, pairs) unit complex numbers."""
    angle = positions_BT.float()[..., None] * inverse_frequency
    return torch.complex(angle.cos(), angle.sin())
