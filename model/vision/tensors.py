"""Tensors of the vision encoder: official names, shapes and dtypes (spec/modules 3.1), and how they are read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from epdserve.model.checkpoint import Checkpoint
from epdserve.model.config import ModelConfig, VisionConfig
from epdserve.model.errors import ConfigError, WeightFileError, WeightMapError
from epdserve.model.fingerprint import Fingerprinter, vision_fingerprint
from epdserve.model.tensor_map import Storage, TensorSpec

CHANNELS: Final = 3
_NUMBERS: Final = frozenset({"BF16", "F32"})


def vision_of(config: ModelConfig) -> VisionConfig:
    """The vision section of a config.

    Raises:
        ConfigError: There is none: the model takes text only.
    """
    if config.vision is None:
        raise ConfigError("config.json", ["vision_config is absent: this model takes no images"])
    return config.vision


def vision_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of vision encoder and aligner, in the order of their use.

    Raises:
        ConfigError: The model takes text only.
    """
    return {name: TensorSpec(shape, _NUMBERS, Storage.PLAIN) for name, shape in _shapes(config)}


def load_vision_tensors(
    model_dir: str | Path, config: ModelConfig, device: torch.device | str = "cpu"
) -> tuple[dict[str, torch.Tensor], bytes]:
    """Read them, as float32, with the identity of what they make of an image (16 bytes).

    Only these tensors are read; the rest of the checkpoint may be anything.

    Raises:
        ConfigError: The model takes text only.
        WeightFileError: A file is absent or unreadable, or a value is not finite.
        WeightMapError: Names, shapes or dtypes differ from what the config asks for.
    """
    vision, expected = vision_of(config), vision_tensors(config)
    checkpoint = Checkpoint.open(model_dir)
    checkpoint.check_part(expected)
    tensors, hasher = {}, Fingerprinter()
    for name, tensor in checkpoint.tensors(frozenset(expected)):
        hasher.add(name, tensor)
        tensors[name] = tensor.to(device, torch.float32, copy=True)
        if not bool(torch.isfinite(tensors[name]).all()):
            raise WeightFileError(f"{name}: a value is not finite")
    if missing := expected.keys() - tensors.keys():
        raise WeightMapError("vision encoder", [f"missing: {name}" for name in sorted(missing)])
    return tensors, vision_fingerprint(hasher.fingerprint(), vision, config.text.hidden_size)


def _shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    vision, out = vision_of(config), config.text.hidden_size
    width, inner = vision.hidden_size, vision.intermediate_size
    yield "vision.patch_embed.proj.weight", (width, CHANNELS * vision.patch_size**2)
    yield "vision.patch_embed.proj.bias", (width,)
    for block in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{block}."
        yield prefix + "norm1.weight", (width,)
        yield prefix + "attn.wqkv.weight", (3 * width, width)
        yield prefix + "attn.wqkv.bias", (3 * width,)
        yield prefix + "attn.wo.weight", (width, width)
        yield prefix + "attn.wo.bias", (width,)
        yield prefix + "norm2.weight", (width,)
        yield prefix + "mlp.w1.weight", (2 * inner, width)  # gate rows, then up rows
        yield prefix + "mlp.w2.weight", (width, inner)
    yield "vision.norm.weight", (width,)
    yield "aligner.w1.weight", (out, width * vision.downsample_ratio**2)
    yield "aligner.w1.bias", (out,)
    yield "aligner.w2.weight", (out, out)
    yield "aligner.w2.bias", (out,)
    for name in ("image_start", "image_newline", "image_end"):
        yield name, (out,)
