"""Heads that never learnt anything, begun anew so that they can.

After copying and look-ups stand, what is learnt sits in layer 0 and in one head of the look-up layer: taking any other
head away changes nothing. The others are sharp about what does not matter, so hardly any gradient reaches them, and a
second hop has no place to be learnt. Here they start over: diffuse queries, and values that are written as the look-up
head writes its own, so that looking at the right token pays at once.
"""

from __future__ import annotations

from typing import Final

import torch
from epdserve.model.config import ModelConfig
from epdserve.model.demo.training.circuits import LOOK_UP_LAYER
from torch import Tensor

_DIFFUSE: Final = 0.3  # standard deviation of the new heads' scores
_OWN_WRITING: Final = 1.0  # of new heads below the look-up layer, beside the size of what they read
_LOOKED_UP: Final = 0.3  # of the look-up head's writing, for heads that write like it
_BELOW: Final = (2, 3)


@torch.no_grad()
def renew_heads(config: ModelConfig, weights: dict[str, Tensor], seed: int) -> None:
    """Overwrite attention below and above the look-up layer, and all of that layer but its first head."""
    draw = torch.Generator().manual_seed(seed)
    for layer in _BELOW:
        _renew_below(config, weights, f"layers.{layer}.attn.", draw)
    for layer in range(LOOK_UP_LAYER, config.text.num_hidden_layers):
        _renew_from(config, weights, layer, draw)


def _renew_below(config: ModelConfig, weights: dict[str, Tensor], prefix: str, draw: torch.Generator) -> None:
    """Every head reads random channels of a token and writes them where they came from."""
    text = config.text
    content = text.head_dim - text.qk_rope_head_dim
    reading = torch.randn(content, text.hidden_size, generator=draw) * text.hidden_size**-0.5
    for name in ("wkv.weight", "compressor.wkv.weight"):
        weights[prefix + name][:content] = reading
    _diffuse(weights, prefix, 0, draw)
    low, out = weights[prefix + "wo_a.weight"], weights[prefix + "wo_b.weight"]
    width, rank = text.head_dim, text.o_lora_rank
    low.zero_()
    for group in range(text.o_groups):
        for head in range(text.num_attention_heads // text.o_groups):
            rows, columns = group * rank, head * width
            low[rows : rows + content, columns : columns + content] = torch.eye(content)
        out[:, group * rank : group * rank + content] = _OWN_WRITING * reading.t()


def _renew_from(config: ModelConfig, weights: dict[str, Tensor], layer: int, draw: torch.Generator) -> None:
    """The look-up head once more in each layer above, and diffuse heads that write what it writes."""
    text = config.text
    source, prefix = f"layers.{LOOK_UP_LAYER}.attn.", f"layers.{layer}.attn."
    width, rank = text.head_dim, text.o_lora_rank
    if layer != LOOK_UP_LAYER:
        for name in ("wq_a", "q_norm", "wkv", "kv_norm"):
            weights[f"{prefix}{name}.weight"].copy_(weights[f"{source}{name}.weight"])
        weights[prefix + "wq_b.weight"][:width] = weights[source + "wq_b.weight"][:width]
        weights[prefix + "attn_sink"][:1] = weights[source + "attn_sink"][:1]
    _diffuse(weights, prefix, width, draw)
    kept = weights[source + "wo_a.weight"][:rank, :width].clone()
    written = weights[source + "wo_b.weight"][:, :rank].clone()
    low, out = weights[prefix + "wo_a.weight"], weights[prefix + "wo_b.weight"]
    for group in range(text.o_groups):
        for head in range(text.num_attention_heads // text.o_groups):
            first = layer == LOOK_UP_LAYER and group == head == 0
            part = kept if first else _LOOKED_UP * kept
            low[group * rank : (group + 1) * rank, head * width : (head + 1) * width] = part
        out[:, group * rank : (group + 1) * rank] = written


def _diffuse(weights: dict[str, Tensor], prefix: str, start: int, draw: torch.Generator) -> None:
    """Small random queries from row ``start`` on."""
    query, sink = weights[prefix + "wq_b.weight"], weights[prefix + "attn_sink"]
    noise = torch.randn(query.shape, generator=draw) * (_DIFFUSE * query.shape[1] ** -0.5)
    query[start:] = noise[start:]
    sink[start * len(sink) // len(query) :] = 0.0
