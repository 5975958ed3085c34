"""What a ``HostCache`` must do, said with a dictionary and no cleverness. For its property test."""

from __future__ import annotations

from dataclasses import dataclass, field

from epdserve.kvstore.types import BlockHash


@dataclass
class ModelEntry:
    """A block that can be found."""

    parent: BlockHash | None
    exact: bool
    pins: int = 0
    used: int = 0  # order of its last use


@dataclass
class HostCacheModel:
    """Blocks by hash; eviction is a loop over all of them."""

    slots: int
    blocks: dict[BlockHash, ModelEntry] = field(default_factory=dict)
    leaving: list[ModelEntry] = field(default_factory=list)  # out, but still read
    filling: int = 0
    quarantined: int = 0
    moments: int = 0

    @property
    def free(self) -> int:
        return self.slots - len(self.blocks) - len(self.leaving) - self.filling - self.quarantined

    def use(self, entry: ModelEntry) -> None:
        if not entry.pins:
            self.moments += 1
            entry.used = self.moments

    def reserve(self) -> bool:
        """Whether a slot can be had, evicting as told."""
        while not self.free:
            kept: set[BlockHash] = set()
            for block_hash, entry in self.blocks.items():
                above: BlockHash | None = block_hash if entry.pins else None
                while above in self.blocks:
                    kept.add(above)
                    above = self.blocks[above].parent
            if set(self.blocks) == kept:
                return False
            parents = {entry.parent for entry in self.blocks.values()}
            leaves = [h for h, e in self.blocks.items() if not e.pins and h not in parents]
            del self.blocks[min(leaves, key=lambda h: self.blocks[h].used)]
        self.filling += 1
        return True

    def seal(self, block_hash: BlockHash, parent: BlockHash | None, exact: bool) -> None:
        self.filling -= 1
        held = self.blocks.get(block_hash)
        if held is not None and (held.exact or not exact):
            return
        self.drop(block_hash)
        entry = self.blocks[block_hash] = ModelEntry(parent, exact)
        self.use(entry)

    def drop(self, block_hash: BlockHash) -> bool:
        entry = self.blocks.pop(block_hash, None)
        if entry is not None and entry.pins:
            self.leaving.append(entry)
        return entry is not None

    def unpin(self, entry: ModelEntry) -> None:
        entry.pins -= 1
        self.use(entry)
        if not entry.pins:
            self.leaving = [other for other in self.leaving if other is not entry]
