"""Embeddings that were fetched a moment ago: a replayed window or a next turn asks for the same image again."""

from __future__ import annotations

from collections import OrderedDict

import torch


class RecentEmbeddings:
    """Bounded by bytes; used longest ago goes first. Owned by one event loop; holds no slot and no lease."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.nbytes = max_bytes, 0
        self._held: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    def get(self, digest: bytes, tokens: int) -> torch.Tensor | None:
        """(tokens, hidden) bfloat16, not to be changed; None if they are not here in that length."""
        held = self._held.get(digest)
        if held is None or len(held) != tokens:
            return None
        self._held.move_to_end(digest)
        return held

    def put(self, digest: bytes, embeddings_ND: torch.Tensor) -> None:
        """Remember what was verified; more than the bound is not remembered at all."""
        if embeddings_ND.nbytes > self._max_bytes:
            return
        if (before := self._held.pop(digest, None)) is not None:
            self.nbytes -= before.nbytes
        self._held[digest] = embeddings_ND
        self.nbytes += embeddings_ND.nbytes
        while self.nbytes > self._max_bytes:
            self.nbytes -= self._held.popitem(last=False)[1].nbytes
