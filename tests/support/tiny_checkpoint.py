"""A writable copy of the golden model's weights, to damage in tests."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

TINY = Path(__file__).parents[1] / "golden" / "tiny"
_LONG_AGO_S = 1_700_000_000


def tiny_tensors() -> dict[str, torch.Tensor]:
    """All stored tensors of the golden model."""
    return load_file(TINY / "model.safetensors")


def write_shards(
    directory: Path, shards: Mapping[str, Mapping[str, torch.Tensor]], *, index: bool = False
) -> None:
    """Write tensors by file name; with ``index`` also the index file that names them.

    The files look old, so that their fingerprint may be remembered.
    """
    for shard, tensors in shards.items():
        save_file(dict(tensors), directory / shard)
        os.utime(directory / shard, (_LONG_AGO_S, _LONG_AGO_S))
    if index:
        weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def split(tensors: Mapping[str, torch.Tensor], count: int) -> dict[str, dict[str, torch.Tensor]]:
    """Deal tensors out over ``count`` numbered shards, so that weights and scales part."""
    shards: dict[str, dict[str, torch.Tensor]] = {
        f"model-{number:05d}-of-{count:05d}.safetensors": {} for number in range(1, count + 1)
    }
    for position, name in enumerate(sorted(tensors)):
        shards[f"model-{position % count + 1:05d}-of-{count:05d}.safetensors"][name] = tensors[name]
    return shards
