"""Identity of a model: whatever could change a cached number gives another fingerprint.

Hashing 475 GiB takes minutes, so the result is remembered in a sidecar file beside the shards. It is believed
only while names, sizes and modification times of all shards are what they were, and while its own check sum
holds.
"""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from epdserve.model.compressed_tokens import MAP_FILE, TOKENIZER_FILE
from epdserve.model.config import ModelConfig, VisionConfig

SIDECAR_FILE: Final = ".epdserve-fingerprint.json"
FINGERPRINT_BYTES: Final = 16
_VERSION: Final = 1
# A file written within the clock tick of its hashing can change again without a new mtime; wait that out.
_SETTLED_NS: Final = 2_000_000_000

ShardStamp = tuple[str, int, int]  # file name, size in bytes, mtime in ns


def model_fingerprint(tensors: bytes, config: ModelConfig, directory: Path) -> bytes:
    """Mix a fingerprint of tensors with what else decides the numbers: the config and the compressed token map.

    The map is taken by the file it comes from, as in ``load_or_derive_token_map``; without either file it is left
    out. 16 bytes.
    """
    state = _hash(tensors)
    state.update(config.model_dump_json().encode())
    for name in (MAP_FILE, TOKENIZER_FILE):
        if (directory / name).is_file():
            state.update(_hash((directory / name).read_bytes()).digest())
            break
    return state.digest()


def vision_fingerprint(tensors: bytes, config: VisionConfig, hidden_size: int) -> bytes:
    """Identity of what a vision encoder makes of an image: its tensors, its numbers and how wide its output is."""
    state = _hash(b"vision" + tensors)
    state.update(config.model_dump_json().encode() + f"/{hidden_size}".encode())
    return state.digest()


class Fingerprinter:
    """Collects tensors in any order: equal sets give equal fingerprints, however they are sharded."""

    def __init__(self) -> None:
        self._digests: dict[str, bytes] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Hash one tensor's name, dtype, shape and bytes. Reads the tensor once, keeps 16 bytes."""
        state = _hash(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        state.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        self._digests[name] = state.digest()

    def fingerprint(self) -> bytes:
        """16 bytes over everything added so far: any changed bit, name, shape or dtype changes them."""
        state = _hash(b"tensors")
        for name in sorted(self._digests):
            state.update(self._digests[name])
        return state.digest()


def stamp_shards(shards: Sequence[Path]) -> list[ShardStamp]:
    """What tells one version of the shards from the next without reading them."""
    stamps = []
    for shard in sorted(shards):
        status = shard.stat()
        stamps.append((shard.name, status.st_size, status.st_mtime_ns))
    return stamps


def read_sidecar(directory: Path, stamps: Sequence[ShardStamp]) -> bytes | None:
    """The remembered fingerprint, or None if none fits these shards. A bad file counts as none."""
    try:
        document = json.loads((directory / SIDECAR_FILE).read_bytes())
        fingerprint = bytes.fromhex(document["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return fingerprint if document == _document(stamps, fingerprint) else None


def write_sidecar(directory: Path, stamps: Sequence[ShardStamp], fingerprint: bytes) -> bool:
    """Remember a fingerprint. False if not: shards too young, or a directory that cannot be written."""
    if any(time.time_ns() - mtime_ns < _SETTLED_NS for _, _, mtime_ns in stamps):
        return False
    content = json.dumps(_document(stamps, fingerprint), indent=1).encode()
    try:
        with tempfile.TemporaryDirectory(dir=directory, prefix=SIDECAR_FILE) as work:
            (Path(work) / SIDECAR_FILE).write_bytes(content)
            os.replace(Path(work) / SIDECAR_FILE, directory / SIDECAR_FILE)
    except OSError:
        return False
    return True


def _document(stamps: Sequence[ShardStamp], fingerprint: bytes) -> dict[str, Any]:
    facts = {
        "version": _VERSION,
        "shards": [list(stamp) for stamp in stamps],
        "fingerprint": fingerprint.hex(),
    }
    return {**facts, "check": _hash(json.dumps(facts, sort_keys=True).encode()).hexdigest()}


def _hash(data: bytes) -> "hashlib.blake2b":
    return hashlib.blake2b(data, digest_size=FINGERPRINT_BYTES, person=b"epd-weights")
