"""Which encode worker gets an image. Pure: snapshot in, choice out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class EncodeLoad:
    """An encode worker and the patches that wait for it."""

    worker: str
    queued_patches: int


def choose_encoder(digest: bytes, loads: Sequence[EncodeLoad], *, spill_patches: int = 32_768) -> str:
    """The image's home, by rendezvous hashing: every router finds the same one, so that its cache serves all of them.

    A worker that joins or leaves moves only its own share. An image whose home has more than ``spill_patches`` waiting
    beyond the least busy worker goes to the next one in its order.

    Raises:
        ValueError: There is no worker.
    """
    if not loads:
        raise ValueError("no encode worker to choose from")
    least = min(load.queued_patches for load in loads)
    fit = [load for load in loads if load.queued_patches - least <= spill_patches]
    return max(fit, key=lambda load: (_score(digest, load.worker), load.worker)).worker


def _score(digest: bytes, worker: str) -> bytes:
    return blake2b(digest + worker.encode(), digest_size=8).digest()
