"""Induction laid into the first weights: one head that reads the token before, one that looks up what followed it.

Found from noise this takes a plateau of some hundred steps, most of what copying and retrieval cost. Laid in, it is
rough, and training only has to refine it. With x the embedding of a token and P, Q, R random maps:

  layer 0  a head attends one position back and writes Q P x(before) beside the token's own x
  layer 4  one part of a key is Q^T of that, so P x(before); the other is R x, of the own token. The query is P x of the
           current token. It meets the keys whose token before is the current one; R^T writes their own x

Keys and values are one vector here; its two parts serve as one each. All other outputs start quiet (``start.py``), or
their noise would drown what layer 4 has to read.
"""

from __future__ import annotations

from typing import Final

import torch
from epdserve.kernels.rope import rope_frequencies
from epdserve.model.config import ModelConfig
from torch import Tensor

SPACE_AXIS: Final = 1  # channels of an embedding that say how a word is written
CAPITAL_AXIS: Final = 2
LOOK_UP_LAYER: Final = 4  # reads all of the past, one entry a token
_COMMON: Final = 2.0  # what all embeddings have along the common axis
_KEY_PART: Final = 1.5
_SHARPNESS: Final = (9.0, 4.0, 3.0)  # of the rotary pairs that look back, fastest first
_BEFORE: Final = 1.5  # how strongly the token before is written
_MATCHED: Final = 16  # channels of a key that are matched; the rest is found
_KEY_GAIN: Final = 2.0  # of the matched half beside the other
_MATCH: Final = 6.0  # how strongly a query meets its keys
_FOUND: Final = 10.0  # how strongly what was found is written


def set_circuits(config: ModelConfig, weights: dict[str, Tensor], seed: int) -> None:
    """Overwrite what the circuit needs in ``weights``."""
    text = config.text
    content = text.head_dim - text.qk_rope_head_dim
    draw = torch.Generator().manual_seed(seed)
    spread = text.hidden_size**-0.5
    reading = torch.randn(content, text.hidden_size, generator=draw) * spread  # P, then R
    writing = torch.randn(text.hidden_size, _MATCHED, generator=draw) * spread  # Q
    reading[:, : CAPITAL_AXIS + 1], writing[: CAPITAL_AXIS + 1] = 0.0, 0.0  # these are no content
    weights["embed.weight"][:, 0] = _COMMON
    _look_back(config, weights, reading)
    _write(weights, 0, slice(0, _MATCHED), _BEFORE * writing)
    _look_up(weights, reading, torch.cat([_KEY_GAIN * writing.t(), reading[_MATCHED:]]))
    _write(weights, LOOK_UP_LAYER, slice(_MATCHED, content), _FOUND * reading[_MATCHED:].t())


def _look_back(config: ModelConfig, weights: dict[str, Tensor], reading: Tensor) -> None:
    """Head 0 of layer 0: constant rotary channels of query and keys, turned so that they agree one position back.

    The fastest pair is sharp, the next ones rule out its other turns within the window.
    """
    text, prefix = config.text, "layers.0.attn."
    content = len(reading)
    frequency = rope_frequencies(text.qk_rope_head_dim, text.rope_theta, None)
    query, key = weights[prefix + "wq_b.weight"], weights[prefix + "wkv.weight"]
    axis = torch.zeros(text.hidden_size)
    axis[0] = 1.0
    weights[prefix + "wq_a.weight"][0] = axis
    query[: text.head_dim] = 0.0
    key[:content] = reading
    for pair, sharpness in enumerate(_SHARPNESS):
        even = content + 2 * pair
        key[even], key[even + 1] = _KEY_PART * axis, 0.0
        query[even, 0] = sharpness * frequency[pair].cos()
        query[even + 1, 0] = -sharpness * frequency[pair].sin()


def _look_up(weights: dict[str, Tensor], reading: Tensor, keeping: Tensor) -> None:
    """Head 0 of a later layer: queries of the own token, keys of the token before."""
    prefix, content = f"layers.{LOOK_UP_LAYER}.attn.", len(reading)
    weights[prefix + "wq_a.weight"][:_MATCHED] = reading[:_MATCHED]
    query = weights[prefix + "wq_b.weight"]
    query[: _head_rows(weights, prefix)] = 0.0
    query[:_MATCHED, :_MATCHED] = _MATCH * torch.eye(_MATCHED)
    for name in ("wkv.weight", "compressor.wkv.weight"):
        weights[prefix + name][:content] = keeping


def _write(weights: dict[str, Tensor], layer: int, channels: slice, writing: Tensor) -> None:
    """These channels of what head 0 found go to the streams through ``writing``, and nothing else of it."""
    prefix, count = f"layers.{layer}.attn.", writing.shape[1]
    low, out = weights[prefix + "wo_a.weight"], weights[prefix + "wo_b.weight"]
    low[:, : _head_rows(weights, prefix)] = 0.0
    low[:count] = 0.0
    low[:count, channels] = torch.eye(count)
    out[:, :count] = writing


def _head_rows(weights: dict[str, Tensor], prefix: str) -> int:
    return weights[prefix + "wkv.weight"].shape[0]
