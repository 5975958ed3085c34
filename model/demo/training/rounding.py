"""Weights as a checkpoint stores them: rounded values for training through them, stored tensors for the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from epdserve.kernels.quant import (
    dequantize_fp8_blocks,
    quantize_fp8_blocks,
    round_fp4_e8m0,
    round_fp8,
)
from epdserve.model.config import ModelConfig
from epdserve.model.demo.training.ops import straight_through
from epdserve.model.demo.training.start import EXPERT
from epdserve.model.demo.weights import store_tensor
from epdserve.model.tensor_map import Storage, expected_tensors
from torch import Tensor

_FLOAT32: Final = frozenset({"F32"})


def _blocks(value: Tensor) -> Tensor:
    return dequantize_fp8_blocks(*quantize_fp8_blocks(value))


def _bf16(value: Tensor) -> Tensor:
    return value.to(torch.bfloat16).float()


_ROUNDERS: Final[dict[Storage, Callable[[Tensor], Tensor]]] = {
    Storage.MXFP4: round_fp4_e8m0,
    Storage.FP8: _blocks,
    Storage.TABLE: round_fp8,
    Storage.PLAIN: _bf16,
}


def as_stored(config: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor with the values it will have once stored; gradients go to the unrounded ones."""
    stored = dict(weights)
    for name, spec in expected_tensors(config).items():
        match = EXPERT.fullmatch(name)
        own = f"{match[1]}.{match[3]}" if match else name
        if spec.storage is not Storage.SCALE and spec.dtypes != _FLOAT32 and stored[own] is weights[own]:
            stored[own] = straight_through(weights[own], _ROUNDERS[spec.storage])
    return stored


def stored_tensors(config: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint in the published formats."""
    tensors: dict[str, Tensor] = {}
    for name, spec in expected_tensors(config).items():
        if spec.storage is Storage.SCALE:
            continue  # comes with its weight
        match = EXPERT.fullmatch(name)
        value = weights[f"{match[1]}.{match[3]}"][int(match[2])] if match else weights[name]
        tensors.update(store_tensor(name, spec, value.detach().contiguous().clone()))
    return tensors
