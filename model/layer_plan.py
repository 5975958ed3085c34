"""The role of every layer: which cache it reads, whose picks it uses, what it writes (spec 4)."""

from dataclasses import dataclass
from enum import Enum

from epdserve.model.config import ModelConfig
from epdserve.model.config_checks import last_at_or_before


class LayerMode(Enum):
    """How a layer attends beyond its window."""

    WINDOW = "window"  # not at all
    FULL = "full"  # writes a cache, scores it, picks from it
    REINDEX = "reindex"  # scores the cache of its KV source inside the candidate pool
    REUSE = "reuse"  # takes the picks of its index source


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer. ``ratio`` is tokens per entry of the cache it reads, 0 without one."""

    index: int
    mode: LayerMode
    ratio: int
    kv_source: int | None
    index_source: int | None
    candidate_source: bool
    engram: bool

    @property
    def writes_cache(self) -> bool:
        """Whether the layer owns a compressor and index keys."""
        return self.mode is LayerMode.FULL

    @property
    def scores_entries(self) -> bool:
        """Whether the layer owns index queries."""
        return self.mode in (LayerMode.FULL, LayerMode.REINDEX)


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """All layers in order."""

    layers: tuple[LayerSpec, ...]

    @classmethod
    def of(cls, config: ModelConfig) -> "LayerPlan":
        """Derive the plan; a valid config always has one."""
        return cls(tuple(_layer(config, index) for index in range(config.text.num_hidden_layers)))

    @property
    def kv_sources(self) -> tuple[int, ...]:
        """Layers that write global KV, ascending: one plane of a block each."""
        return tuple(layer.index for layer in self.layers if layer.writes_cache)

    @property
    def cut(self) -> int:
        """The last layer that writes global KV. Layers above it may run on the kept rows only (spec 8.2)."""
        return self.kv_sources[-1]

    @property
    def engram_layers(self) -> tuple[int, ...]:
        """Layers with an Engram injection before them, ascending."""
        return tuple(layer.index for layer in self.layers if layer.engram)


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    text = config.text
    ratio = text.compress_ratios[index]
    return LayerSpec(
        index=index,
        mode=_mode(config, index),
        ratio=ratio,
        kv_source=last_at_or_before(text.kv_source_layer_ids, index) if ratio else None,
        index_source=last_at_or_before(text.index_source_layer_ids, index) if ratio else None,
        candidate_source=index == text.candidate_source_layer_id,
        engram=index in text.engram_layer_ids,
    )


def _mode(config: ModelConfig, index: int) -> LayerMode:
    text = config.text
    if text.compress_ratios[index] == 0:
        return LayerMode.WINDOW
    if index in text.kv_source_layer_ids:
        return LayerMode.FULL
    return LayerMode.REINDEX if index in text.index_source_layer_ids else LayerMode.REUSE
