"""What a ``BlockManager`` must do, said with dictionaries and no cleverness. For its property test."""

from __future__ import annotations

from dataclasses import dataclass, field

from epdserve.kvstore.types import BlockHash, PageId


@dataclass
class ModelBlock:
    """A sealed or cached block."""

    page: PageId
    parent: BlockHash | None
    exact: bool
    checksum: int
    references: int = 1
    used: int = 0  # order of the moment its last reference went


@dataclass
class BlockModel:
    """Pages by phase, blocks by hash. Eviction is a loop over all blocks."""

    num_pages: int
    blocks: dict[BlockHash, ModelBlock] = field(default_factory=dict)
    orphans: dict[PageId, int] = field(default_factory=dict)  # replaced pages and their references
    filling: set[PageId] = field(default_factory=set)
    quarantined: set[PageId] = field(default_factory=set)
    moments: int = 0

    @property
    def free(self) -> int:
        held = len(self.blocks) + len(self.orphans) + len(self.filling) + len(self.quarantined)
        return self.num_pages - held

    def evictable(self) -> set[BlockHash]:
        """Unreferenced blocks below which nothing is referenced."""
        kept: set[BlockHash] = set()
        for block_hash, block in self.blocks.items():
            above: BlockHash | None = block_hash if block.references else None
            while above in self.blocks:
                kept.add(above)
                above = self.blocks[above].parent
        return set(self.blocks) - kept

    def evict(self) -> BlockHash:
        """The least recently used of the unreferenced blocks without children."""
        parents = {block.parent for block in self.blocks.values()}
        leaves = {h: b for h, b in self.blocks.items() if not b.references and h not in parents}
        victim = min(leaves, key=lambda block_hash: leaves[block_hash].used)
        del self.blocks[victim]
        return victim

    def forget_all(self) -> int:
        """Nobody finds anything; readers keep what they have."""
        count = len(self.blocks)
        self.orphans |= {block.page: block.references for block in self.blocks.values() if block.references}
        self.blocks.clear()
        return count

    def release(self, page: PageId) -> None:
        if page in self.orphans:
            self.orphans[page] -= 1
            if not self.orphans[page]:
                del self.orphans[page]
            return
        block = next(block for block in self.blocks.values() if block.page == page)
        block.references -= 1
        if not block.references:
            self.moments += 1
            block.used = self.moments

    def seal(self, page: PageId, block_hash: BlockHash, block: ModelBlock) -> PageId:
        self.filling.remove(page)
        old = self.blocks.get(block_hash)
        if old is not None and (old.exact or not block.exact):
            old.references += 1
            return old.page
        if old is not None and old.references:
            self.orphans[old.page] = old.references
        if old is not None:
            block.parent = old.parent
        self.blocks[block_hash] = block
        return page
