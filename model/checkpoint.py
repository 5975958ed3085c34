"""Safetensors files of a model directory: headers first, then one tensor at a time.

No pickle anywhere: only ``.safetensors`` files are opened. Headers are read without torch, so that a command can refuse
a broken model before it starts a process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from epdserve.model.errors import WeightFileError, WeightMapError
from epdserve.model.tensor_map import IGNORED_PREFIXES, TensorSpec
from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    import torch

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
SHARD_PATTERN: Final = "model-*-of-*.safetensors"


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file says about one tensor; ``dtype`` is the format's own name, such as ``F8_E4M3``."""

    shard: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The headers of all shards. ``faults`` are contradictions between shards and index file."""

    shards: tuple[Path, ...]
    headers: Mapping[str, TensorHeader]
    faults: tuple[str, ...]

    @classmethod
    def open(cls, model_dir: str | Path) -> Checkpoint:
        """Read the headers of ``model.safetensors``, of its numbered shards, or of those an index names.

        Raises:
            WeightFileError: If there are no such files or one cannot be read.
        """
        directory = Path(model_dir)
        index = _read_index(directory / INDEX_FILE)
        shards = _shard_paths(directory, index)
        headers: dict[str, TensorHeader] = {}
        faults: list[str] = []
        for shard in shards:
            for name, header in _read_headers(shard):
                if name in headers:
                    faults.append(f"twice: {name} is in {headers[name].shard.name} and {shard.name}")
                headers[name] = header
        for name, stated in index.items():
            found = headers[name].shard.name if name in headers else "no file"
            if found != stated:
                faults.append(f"index: {name} should be in {stated}, is in {found}")
        return cls(shards, headers, tuple(faults))

    def check(self, expected: Mapping[str, TensorSpec]) -> None:
        """Compare names, shapes and dtypes with what a config asks for.

        Raises:
            WeightMapError: Naming every missing, extra, misshapen and wrongly typed tensor.
        """
        self._refuse([*self.faults, *self._differences(expected, whole=True)])

    def check_part(self, expected: Mapping[str, TensorSpec]) -> None:
        """Compare the expected tensors and no others.

        Raises:
            WeightMapError: Naming every missing, misshapen and wrongly typed tensor.
        """
        self._refuse(list(self._differences(expected, whole=False)))

    @staticmethod
    def _refuse(problems: list[str]) -> None:
        if problems:
            raise WeightMapError("weights do not fit config.json", problems)

    def _differences(self, expected: Mapping[str, TensorSpec], *, whole: bool) -> Iterator[str]:
        yield from (
            f"missing: {name} {list(expected[name].shape)}" for name in expected if name not in self.headers
        )
        for name, header in self.headers.items():
            spec = expected.get(name)
            if spec is None:
                if whole and not name.startswith(IGNORED_PREFIXES):
                    yield f"extra: {name} {header.dtype} {list(header.shape)}"
                continue
            if header.shape != spec.shape:
                yield f"shape: {name} is {list(header.shape)}, expected {list(spec.shape)}"
            if header.dtype not in spec.dtypes:
                yield f"dtype: {name} is {header.dtype}, expected {' or '.join(sorted(spec.dtypes))}"

    def tensors(self, names: frozenset[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, one at a time: shard after shard, names ascending, so a scale precedes its weight.

        With ``names`` only those, and only the shards that hold some of them.

        Tensors are views of the mapped file where the library allows it: copy what must outlive the step.

        Raises:
            WeightFileError: If a shard became unreadable since ``open``.
        """
        for shard in self.shards:
            if names is not None and not any(self.headers[name].shard == shard for name in names):
                continue
            try:
                with safe_open(shard, framework="pt") as file:
                    for name in sorted(file.keys()):
                        if names is None or name in names:
                            yield name, file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise WeightFileError(f"{shard}: {error}") from None


def _read_index(path: Path) -> dict[str, str]:
    """The ``weight_map`` of an index file: tensor name -> file name; empty without the file."""
    try:
        document = json.loads(path.read_bytes())
        weight_map = document["weight_map"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightFileError(f"{path}: no usable weight_map ({error!r})") from None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise WeightFileError(f"{path}: weight_map must map tensor names to file names")
    if outside := sorted({shard for shard in weight_map.values() if Path(shard).name != shard}):
        raise WeightFileError(f"{path}: shards must lie beside the index, got {outside}")
    return weight_map


def _shard_paths(directory: Path, index: Mapping[str, str]) -> tuple[Path, ...]:
    if index:
        return tuple(directory / shard for shard in sorted(set(index.values())))
    if (directory / SINGLE_FILE).is_file():
        return (directory / SINGLE_FILE,)
    shards = tuple(sorted(directory.glob(SHARD_PATTERN)))
    if not shards:
        raise WeightFileError(f"{directory}: no {SINGLE_FILE}, no {INDEX_FILE} and no {SHARD_PATTERN}")
    return shards


def _read_headers(shard: Path) -> Iterator[tuple[str, TensorHeader]]:
    try:
        with safe_open(shard, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - the file object is no mapping
                entry = file.get_slice(name)
                yield name, TensorHeader(shard, entry.get_dtype(), tuple(entry.get_shape()))
    except (OSError, SafetensorError) as error:
        raise WeightFileError(f"{shard}: {error}") from None
