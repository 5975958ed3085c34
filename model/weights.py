"""Weights of the text backbone: checked, streamed, dequantised, fingerprinted.

One tensor at a time is in memory beside the result. Dequantised values are exact (each fits in bfloat16).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from epdserve.kernels.quant import dequantize_fp8_blocks, dequantize_mxfp4
from epdserve.model.checkpoint import Checkpoint
from epdserve.model.config import ModelConfig
from epdserve.model.errors import WeightFileError
from epdserve.model.fingerprint import (
    Fingerprinter,
    model_fingerprint,
    read_sidecar,
    stamp_shards,
    write_sidecar,
)
from epdserve.model.tensor_map import Storage, TensorSpec, expected_tensors

__all__ = ["Storage", "TensorSpec", "Weights", "expected_tensors", "load_tensors", "load_weights"]

_EXPERT: Final = re.compile(r"(layers\.\d+\.ffn\.experts)\.(\d+)\.(w[123])\.weight")
_E8M0_NAN: Final = 255

Observer = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors of the backbone by name, and the identity of the model they make.

    Names are the official ones. ``X.weight`` is dequantised float32 and ``X.scale`` is gone, but for two
    kinds: routed experts are stacked as ``layers.{L}.ffn.experts.w1`` [experts, out, in], and Engram tables
    stay in storage form, ``embed.weight`` (uint8 E4M3, [rows, width]) with ``embed.scale`` (uint8 E8M0,
    [rows, width / 32]).
    """

    tensors: dict[str, torch.Tensor]
    fingerprint: bytes


def load_tensors(
    model_dir: str | Path, expected: Mapping[str, TensorSpec], *, observe: Observer | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream the expected tensors as stored, after checking the headers of all shards.

    Args:
        model_dir: Directory with safetensors files, with or without an index.
        expected: What must be there; drafter and vision tensors may be there too and are skipped.
        observe: Called with every tensor of the files, skipped ones too, in the same pass.

    Yields:
        (name, tensor) on the CPU. The tensor may be a view of the mapped file: copy to keep it.

    Raises:
        WeightFileError: A file is absent or unreadable.
        WeightMapError: Naming every tensor that is missing, extra, misshapen or wrongly typed.
    """
    checkpoint = Checkpoint.open(model_dir)
    checkpoint.check(expected)
    return _stream(checkpoint, expected, observe)


def load_weights(model_dir: str | Path, config: ModelConfig, device: torch.device | str = "cpu") -> Weights:
    """Load and dequantise the backbone, and identify the model.

    The fingerprint covers every tensor of the files, the config and the token map's file. Tensors are hashed on
    the way and the result is remembered in a sidecar; a later load of the same files skips the hashing.

    Raises:
        WeightFileError: A file is absent, unreadable, changed meanwhile, or a value is not finite.
        WeightMapError: Names, shapes or dtypes differ from what the config asks for.
    """
    directory = Path(model_dir)
    expected = expected_tensors(config)
    checkpoint = Checkpoint.open(directory)
    checkpoint.check(expected)
    stamps = stamp_shards(checkpoint.shards)
    fingerprint = read_sidecar(directory, stamps)
    hasher = Fingerprinter()
    assembly = _Assembly(config, expected, torch.device(device))
    for name, tensor in _stream(checkpoint, expected, hasher.add if fingerprint is None else None):
        assembly.add(name, tensor)
    if stamp_shards(checkpoint.shards) != stamps:
        raise WeightFileError(f"{directory}: shards changed while they were read")
    if fingerprint is None:
        fingerprint = hasher.fingerprint()
        write_sidecar(directory, stamps, fingerprint)
    return Weights(assembly.tensors, model_fingerprint(fingerprint, config, directory))


def _stream(
    checkpoint: Checkpoint, expected: Mapping[str, TensorSpec], observe: Observer | None
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in checkpoint.tensors():
        if observe is not None:
            observe(name, tensor)
        if name in expected:
            yield name, tensor


class _Assembly:
    """Pairs weights with their scales, dequantises, and stacks experts."""

    def __init__(self, config: ModelConfig, expected: Mapping[str, TensorSpec], device: torch.device) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._experts = config.text.n_routed_experts
        self._expected = expected
        self._device = device
        self._waiting: dict[str, torch.Tensor] = {}  # one half of a pair whose other half is in a later shard

    def add(self, name: str, tensor: torch.Tensor) -> None:
        spec = self._expected[name]
        if spec.storage is Storage.PLAIN:
            self._put(name, _finite(name, tensor.to(self._device, torch.float32, copy=True)))
            return
        weight_name = spec.scale_of or name
        other = self._waiting.pop(weight_name, None)
        if other is None:
            self._waiting[weight_name] = tensor
        elif spec.storage is Storage.SCALE:
            self._add_pair(weight_name, other, tensor)
        else:
            self._add_pair(weight_name, tensor, other)

    def _add_pair(self, name: str, weight: torch.Tensor, scale: torch.Tensor) -> None:
        weight, scale = (part.view(torch.uint8).to(self._device) for part in (weight, scale))
        if bool((scale == _E8M0_NAN).any()):
            raise WeightFileError(f"{name}: a scale is NaN")
        storage = self._expected[name].storage
        if storage is Storage.TABLE:
            # Copied: a view would crash the process if somebody cut the mapped file short later.
            self.tensors[name] = weight.clone()
            self.tensors[name.removesuffix("weight") + "scale"] = scale.clone()
        elif storage is Storage.MXFP4:
            self._put(name, dequantize_mxfp4(weight, scale))
        else:
            self._put(name, _finite(name, dequantize_fp8_blocks(weight, scale)))

    def _put(self, name: str, value: torch.Tensor) -> None:
        if (match := _EXPERT.fullmatch(name)) is None:
            self.tensors[name] = value
            return
        experts, index, matrix = match.groups()
        stack = self.tensors.get(f"{experts}.{matrix}")
        if stack is None:
            stack = self.tensors[f"{experts}.{matrix}"] = value.new_empty(self._experts, *value.shape)
        stack[int(index)] = value


def _finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not bool(torch.isfinite(tensor).all()):
        raise WeightFileError(f"{name}: a value is not finite")
    return tensor
