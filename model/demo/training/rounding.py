"""Weights as a checkpoint stores them: rounded values for training through them, stored tensors for the file."""

from __future__ import annotations

import re
from collections.abc import Mapping
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

_STACKED: Final = re.compile(r"\.experts\.w[123]$")
_BLOCKS: Final = re.compile(r"\.(wq_a|wq_b|wkv|wo_a|wo_b|shared_experts\.w[123])\.weight$")


def _blocks(value: Tensor) -> Tensor:
    return dequantize_fp8_blocks(*quantize_fp8_blocks(value))


def _bf16(value: Tensor) -> Tensor:
    return value.to(torch.bfloat16).float()


def as_stored(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor with the values it will have once stored; gradients go to the unrounded ones."""
    stored = {}
    for name, value in weights.items():
        if _STACKED.search(name):
            stored[name] = straight_through(value, round_fp4_e8m0)
        elif name.endswith("engram.embed.weight"):
            stored[name] = straight_through(value, round_fp8)
        elif _BLOCKS.search(name) and "compressor" not in name:
            stored[name] = straight_through(value, _blocks)
        else:
            stored[name] = value if value.ndim < 2 or ".hc_" in name else straight_through(value, _bf16)
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
