"""Records what layers of a Backbone compute, by wrapping the objects of one instance."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from epdserve.model.backbone import Backbone
from epdserve.model.layers.block import Block, Residual
from epdserve.model.layers.context import ForwardContext
from epdserve.model.layers.wide_caches import WideCaches


@dataclass
class Recorder:
    """Arrays of the last forward, by layer."""

    streams: dict[int, torch.Tensor] = field(default_factory=dict)
    carried: dict[int, torch.Tensor] = field(default_factory=dict)
    engram_streams: dict[int, torch.Tensor] = field(default_factory=dict)
    engram_rows: dict[int, torch.Tensor] = field(default_factory=dict)
    attn_out: dict[int, torch.Tensor] = field(default_factory=dict)
    ffn_out: dict[int, torch.Tensor] = field(default_factory=dict)
    entries: dict[int, torch.Tensor] = field(default_factory=dict)
    scores: dict[int, torch.Tensor] = field(default_factory=dict)  # (T, E), first row group
    experts: dict[int, torch.Tensor] = field(default_factory=dict)
    expert_weights: dict[int, torch.Tensor] = field(default_factory=dict)


def blocks(backbone: Backbone) -> list[Block]:
    """All layers in order."""
    return [*backbone.encoder.blocks, backbone.encoder.cut_block, *backbone.decoder.blocks]


def record(backbone: Backbone) -> Recorder:
    """Wrap the backbone; every later forward fills the recorder anew."""
    recorder = Recorder()
    for block in blocks(backbone):
        _wrap_block(block, recorder)
    return recorder


def _wrap_block(block: Block, recorder: Recorder) -> None:
    layer = block.spec.index

    def after(owner: object, name: str, keep: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            keep(result, *args)
            return result

        setattr(owner, name, wrapped)

    def keep_residual(result: Residual, *args: Any) -> None:
        recorder.streams[layer] = result.settled().streams_TnD.clone()
        recorder.carried[layer] = result.carried_Tn.clone()

    def keep_selection(result: None, x: Any, qr: Any, rows: Any, context: ForwardContext) -> None:
        assert block.attention.indexer is not None
        recorder.entries[layer] = context.caches.entries(layer).clone()
        if not isinstance(context.caches, WideCaches):
            return
        visible_T = (rows.positions_T + 1) // block.spec.ratio
        query = context.caches.round_queries(block.attention.indexer.queries(x, qr, rows))
        scores = context.caches.scores(block.spec, query, visible_T, 0, rows.groups[0]).flatten(0, 1)
        hidden = torch.arange(scores.shape[1]) >= visible_T[rows.groups[0].rows_SQ.flatten()][:, None]
        recorder.scores[layer] = scores.masked_fill(hidden, float("-inf"))

    after(block, "_finish", keep_residual)
    after(block.attention, "attend", lambda result, *_: recorder.attn_out.__setitem__(layer, result.clone()))
    if block.engram is not None:
        after(
            block,
            "inject",
            lambda result, *_: recorder.engram_streams.__setitem__(layer, result.streams_TnD.clone()),
        )
        after(
            block.engram,
            "address",
            lambda result, *_: recorder.engram_rows.__setitem__(layer, result.clone()),
        )
    if block.attention.indexer is not None:
        after(block.attention.indexer, "select", keep_selection)
    _wrap_moe(block, recorder, layer)


def _wrap_moe(block: Block, recorder: Recorder, layer: int) -> None:
    # MoE and its experts are called as functions, which Python looks up on the class: replace the objects by wrappers.
    moe, experts = block.moe, block.moe.experts

    def keep_route(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        recorder.experts[layer], recorder.expert_weights[layer] = chosen.clone(), weights.clone()
        return experts(x, chosen, weights)

    def call(x: torch.Tensor, is_image: torch.Tensor) -> torch.Tensor:
        out = moe(x, is_image)
        recorder.ffn_out[layer] = out.clone()
        return out

    moe.experts = keep_route
    block.moe = call  # type: ignore[assignment]
