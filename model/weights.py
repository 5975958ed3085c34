"""Weights of the text backbone: checked, streamed, brought into a form, fingerprinted.

One tensor at a time is in memory beside the result. Dequantised values are exact (each fits in bfloat16).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from epdserve.model.assembly import Assembly, WeightForm
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

__all__ = [
    "Storage",
    "TensorSpec",
    "WeightForm",
    "Weights",
    "expected_tensors",
    "load_tensors",
    "load_weights",
]

Observer = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors of the backbone by name, and the identity of the model they make.

    Names are the official ones. In the wide form ``X.weight`` is dequantised float32 and ``X.scale`` is gone, but for
    two kinds: routed experts are stacked as ``layers.{L}.ffn.experts.w1`` [experts, out, in], and Engram tables
    stay in storage form, ``embed.weight`` (uint8 E4M3, [rows, width]) with ``embed.scale`` (uint8 E8M0,
    [rows, width / 32]). In the stored form all of them stay so, and routed experts are stacked as ``experts.w13`` and
    ``experts.w2`` (uint8, two E2M1 codes a byte) with ``experts.w13_scale`` and ``experts.w2_scale``.
    """

    tensors: dict[str, torch.Tensor]
    fingerprint: bytes
    form: WeightForm = WeightForm.WIDE


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


def load_weights(
    model_dir: str | Path,
    config: ModelConfig,
    device: torch.device | str = "cpu",
    form: WeightForm = WeightForm.WIDE,
) -> Weights:
    """Load the backbone in a form, and identify the model.

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
    assembly = Assembly(config, expected, torch.device(device), form)
    for name, tensor in _stream(checkpoint, expected, hasher.add if fingerprint is None else None):
        assembly.add(name, tensor)
    if stamp_shards(checkpoint.shards) != stamps:
        raise WeightFileError(f"{directory}: shards changed while they were read")
    if fingerprint is None:
        fingerprint = hasher.fingerprint()
        write_sidecar(directory, stamps, fingerprint)
    return Weights(assembly.tensors, model_fingerprint(fingerprint, config, directory), form)


def _stream(
    checkpoint: Checkpoint, expected: Mapping[str, TensorSpec], observe: Observer | None
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in checkpoint.tensors():
        if observe is not None:
            observe(name, tensor)
        if name in expected:
            yield name, tensor
