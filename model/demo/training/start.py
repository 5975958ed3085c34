"""Weights before training, by the names and shapes that serving loads (float32; Engram tables as numbers)."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Final

import torch
from epdserve.model.config import ModelConfig
from epdserve.model.demo.training.circuits import CAPITAL_AXIS, SPACE_AXIS, set_circuits
from epdserve.model.tensor_map import Storage, TensorSpec, expected_tensors
from torch import Tensor

EXPERT: Final = re.compile(r"(layers\.\d+\.ffn\.experts)\.(\d+)\.(w[123])\.weight")
_KEEP: Final = 2.0  # how strongly a residual copy is kept to itself and read in turn, before the sigmoid
_FORM: Final = 1.0  # of an embedding, along the axes of space and capital
_SHARED: Final = 0.9  # of an embedding, what it has in common with the others of its class
_SURE: Final = 3.0  # least cross-entropy of copying before any step
_QUIET: Final = 0.2  # of what is usual, for all that writes into the streams
_HYPER_SCALE: Final = 0.1
_HYPER_SPREAD: Final = 0.02


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that is trained, experts stacked, in layer order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, spec in expected_tensors(config).items():
        if spec.storage is Storage.SCALE:
            continue
        shape = _numbers_shape(spec)
        if match := EXPERT.fullmatch(name):
            shapes[f"{match[1]}.{match[3]}"] = (config.text.n_routed_experts, *shape)
        else:
            shapes[name] = shape
    return shapes


def start_weights(
    config: ModelConfig, seed: int, token_map_V: Tensor, texts_V: Sequence[str]
) -> dict[str, Tensor]:
    """Every tensor, drawn from a generator of (seed, name).

    Args:
        token_map_V: Class of each token (``derive_token_map``): tokens of a class start alike.
        texts_V: What each token stands for.
    """
    weights = {
        name: _start(
            config, name, shape, torch.Generator().manual_seed(seed * 2**32 + zlib.crc32(name.encode()))
        )
        for name, shape in parameter_shapes(config).items()
    }
    _tie(weights, token_map_V, texts_V)
    set_circuits(config, weights, seed)
    return weights


def _tie(weights: dict[str, Tensor], token_map_V: Tensor, texts_V: Sequence[str]) -> None:
    """Tokens that differ in case or spaces start alike but for two axes, and the head is the embedding, scaled.

    So what attention carries over from one token predicts that token at once, and turning two axes is all that it
    takes to say a word without its space or with a capital: copying is learnt for all words together.
    """
    own = weights["embed.weight"]
    embedding = _SHARED * own[_first_of_class(token_map_V)] + (1 - _SHARED**2) ** 0.5 * own
    for axis, form in ((SPACE_AXIS, str.isspace), (CAPITAL_AXIS, str.isupper)):
        marks = [form(text.lstrip()[:1] if axis == CAPITAL_AXIS else text[:1]) for text in texts_V]
        embedding[:, axis] = (torch.tensor(marks).float() * 2 - 1) * _FORM
    weights["embed.weight"] = embedding
    weights["head.weight"] = embedding * _SURE * own.shape[1] ** -0.5


def _first_of_class(token_map_V: Tensor) -> Tensor:
    """The lowest token of each token's class."""
    first = torch.full((int(token_map_V.max()) + 1,), len(token_map_V))
    first.scatter_reduce_(0, token_map_V, torch.arange(len(token_map_V)), "amin")
    return first[token_map_V]


def _start(config: ModelConfig, name: str, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    text = config.text
    if re.search(r"norm\.weight$|\.[qk]_weight$", name):
        return torch.ones(shape)
    if re.search(r"attn_sink$|gate\.bias(_vl)?$", name):
        return torch.zeros(shape)
    if name.endswith("_scale"):
        return torch.full(shape, _HYPER_SCALE)
    if name.endswith("_base"):
        return _hyper_base(text.hc_mult, name)
    noise = torch.randn(shape, generator=draw)
    if name.endswith("_fn"):
        return noise * _HYPER_SPREAD
    if name == "embed.weight":
        return noise * 0.5
    if name.endswith("engram.embed.weight"):
        return noise * 0.3
    if re.search(r"wo_b|w2(\.weight)?$", name):
        noise *= _QUIET * (2 * text.num_hidden_layers) ** -0.5
    if name.endswith("engram.wkv.weight"):
        noise *= _QUIET
    return noise.mul(shape[-1] ** -0.5)


def _hyper_base(copies: int, name: str) -> Tensor:
    """Each sub-block predicts that the next one reads mostly one copy; every copy is kept and written to."""
    layer, part = int(name.split(".")[1]), int("_ffn_" in name)
    base = torch.zeros(2 * copies + copies * copies)
    base[:copies] = -_KEEP
    base[(2 * layer + part + 1) % copies] = _KEEP
    base[2 * copies :] = (torch.eye(copies) * 2 * _KEEP - _KEEP).flatten()
    return base


def _numbers_shape(spec: TensorSpec) -> tuple[int, ...]:
    return (spec.shape[0], 2 * spec.shape[1]) if spec.storage is Storage.MXFP4 else spec.shape
