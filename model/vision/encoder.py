"""The vision encoder: patches of several images through one tower, each image to the embeddings of its span.

All linear layers run over the patches of all images at once, whatever their sizes; only attention, which must not mix
images, runs image by image. So nothing is padded, and an image's bits do not depend on what it is batched with.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from epdserve.kernels.linear import linear
from epdserve.kernels.norm import rms_norm
from epdserve.kernels.vision import (
    gelu,
    grid_rotations,
    image_attention,
    merge_windows,
    rotate_halves,
    silu_gate,
)
from epdserve.model.config import ModelConfig, VisionConfig
from epdserve.model.vision.geometry import ImageShape
from epdserve.model.vision.pixels import Pixels
from epdserve.model.vision.tensors import load_vision_tensors, vision_of

NORM_EPS: Final = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class PatchedImage:
    """An image as the tower takes it: ``pixels`` (height, width, 3) uint8 of the size that ``shape`` says."""

    shape: ImageShape
    pixels: Pixels


@dataclass(frozen=True, slots=True)
class _Batch:
    """Images one after another: patches of each, and the rotations of its grid."""

    shapes: tuple[ImageShape, ...]
    rotations: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @property
    def counts(self) -> list[int]:
        return [shape.patches for shape in self.shapes]


class _Block:
    """One pre-norm block: attention within each image, then the gated MLP."""

    def __init__(self, weights: Mapping[str, torch.Tensor], prefix: str, heads: int) -> None:
        self._heads = heads
        self._norm1, self._norm2 = weights[prefix + "norm1.weight"], weights[prefix + "norm2.weight"]
        self._qkv = weights[prefix + "attn.wqkv.weight"], weights[prefix + "attn.wqkv.bias"]
        self._out = weights[prefix + "attn.wo.weight"], weights[prefix + "attn.wo.bias"]
        self._w1, self._w2 = weights[prefix + "mlp.w1.weight"], weights[prefix + "mlp.w2.weight"]

    def __call__(self, x_NC: torch.Tensor, batch: _Batch) -> torch.Tensor:
        qkv_N3HD = _affine(rms_norm(x_NC, self._norm1, NORM_EPS), self._qkv).unflatten(
            -1, (3, self._heads, -1)
        )
        mixed = [
            _attend(qkv, rotation)
            for qkv, rotation in zip(qkv_N3HD.split(batch.counts), batch.rotations, strict=True)
        ]
        x_NC = x_NC + _affine(torch.cat(mixed), self._out)
        gate, up = linear(rms_norm(x_NC, self._norm2, NORM_EPS), self._w1).chunk(2, dim=-1)
        return x_NC + linear(silu_gate(gate, up), self._w2)


class VisionEncoder:
    """Tower, merge and aligner in float32. Holds no request state; not thread-safe.

    Attributes:
        fingerprint: Identity of what this makes of an image, 16 bytes.
        hidden_size: Width of an embedding, that of the language model.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor], fingerprint: bytes) -> None:
        self.config: VisionConfig = vision_of(config)
        self.fingerprint, self.hidden_size = fingerprint, config.text.hidden_size
        vision = self.config
        self._embed = weights["vision.patch_embed.proj.weight"], weights["vision.patch_embed.proj.bias"]
        self._blocks = [
            _Block(weights, f"vision.blocks.{index}.", vision.num_attention_heads)
            for index in range(vision.num_hidden_layers)
        ]
        self._norm = weights["vision.norm.weight"]
        self._align1 = weights["aligner.w1.weight"], weights["aligner.w1.bias"]
        self._align2 = weights["aligner.w2.weight"], weights["aligner.w2.bias"]
        self._start, self._newline, self._end = (
            weights[name] for name in ("image_start", "image_newline", "image_end")
        )
        self._device = self._norm.device

    @staticmethod
    def load(
        model_dir: str | Path, config: ModelConfig, device: torch.device | str = "cpu"
    ) -> "VisionEncoder":
        """Read the vision part of a model directory.

        Raises:
            ConfigError, WeightFileError, WeightMapError: As ``load_vision_tensors``.
        """
        return VisionEncoder(config, *load_vision_tensors(model_dir, config, device))

    @torch.inference_mode()
    def encode(self, images: Sequence[PatchedImage]) -> list[torch.Tensor]:
        """Embeddings of each image's span, (shape.tokens, hidden) float32 on this encoder's device."""
        if not images:
            return []
        batch = self._batch([image.shape for image in images])
        x_NC = _affine(torch.cat([self._patches(image) for image in images]), self._embed)
        for block in self._blocks:
            x_NC = block(x_NC, batch)
        x_NC = rms_norm(x_NC, self._norm, NORM_EPS)
        return [
            self._span(features_NC, shape)
            for features_NC, shape in zip(x_NC.split(batch.counts), batch.shapes, strict=True)
        ]

    def _batch(self, shapes: Sequence[ImageShape]) -> _Batch:
        head_dim = self.config.hidden_size // self.config.num_attention_heads
        rotations = []
        for shape in shapes:
            cos, sin = grid_rotations(shape.rows, shape.columns, head_dim, self.config.rope_theta)
            rotations.append((cos.to(self._device), sin.to(self._device)))
        return _Batch(tuple(shapes), tuple(rotations))

    def _patches(self, image: PatchedImage) -> torch.Tensor:
        """(N, 3 * patch * patch) float32, values in [-1, 1] rounded to bfloat16; channel, then y, then x."""
        shape, side = image.shape, self.config.patch_size
        if image.pixels.shape != (shape.height, shape.width, 3):
            raise ValueError(f"pixels of shape {image.pixels.shape} for {shape}")
        pixels = torch.from_numpy(np.array(image.pixels)).to(self._device)
        values = pixels.float().div_(255.0).sub_(0.5).div_(0.5).to(torch.bfloat16).float()
        grid = values.view(shape.rows, side, shape.columns, side, 3)
        return grid.permute(0, 2, 4, 1, 3).reshape(shape.patches, -1)

    def _span(self, features_NC: torch.Tensor, shape: ImageShape) -> torch.Tensor:
        """Start, rows of cells each with a newline after it, end (spec/modules 3.4)."""
        cells = merge_windows(features_NC, shape.rows, shape.columns, self.config.downsample_ratio)
        cells_ND = _affine(gelu(_affine(cells, self._align1)), self._align2)
        grid_YXD = cells_ND.view(shape.cells_y, shape.cells_x, -1)
        newline = self._newline.expand(shape.cells_y, 1, -1)
        lines_ND = torch.cat((grid_YXD, newline), dim=1).flatten(0, 1)
        return torch.cat((self._start[None], lines_ND, self._end[None]))


def _attend(qkv_N3HD: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    q, k, v = qkv_N3HD.unbind(1)
    return image_attention(rotate_halves(q, *rotation), rotate_halves(k, *rotation), v).flatten(1)


def _affine(x_NK: torch.Tensor, weight_and_bias: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    weight, bias = weight_and_bias
    return linear(x_NK, weight) + bias
