"""Which page holds which block, and which unreferenced block may go next.

Blocks form a forest: a block's parent is the one before it in the prompt. A parent is of use without its
children, a child is of none without its parent, so blocks go leaves first, the least recently used leaf of
all first. To know how many could go without trying, every node counts its *busy* children: a block is busy
while it is referenced or any child is busy. Steps that flip a block's business walk up the chain only as far
as something changes. Not thread-safe; owned by ``BlockManager``.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from epdserve.kvstore.types import BlockHash, PageId


@dataclass(slots=True)
class _Node:
    block_hash: BlockHash
    parent: BlockHash | None = None
    page: PageId | None = None  # None: not here, only remembered because children are
    children: int = 0
    busy_children: int = 0
    referenced: bool = False
    tick: int = 0  # order of last use
    used_at: float = 0.0

    @property
    def busy(self) -> bool:
        return self.referenced or self.busy_children > 0


class Evicted(NamedTuple):
    """A block that was just dropped from the index."""

    block_hash: BlockHash
    page: PageId
    used_at: float  # Clock.monotonic() of its last use


class PrefixIndex:
    """Hash to page, with leaves-first LRU order over blocks nobody references."""

    def __init__(self) -> None:
        self._nodes: dict[BlockHash, _Node] = {}
        self._leaves: list[tuple[int, BlockHash]] = []  # heap; entries whose tick is out of date are skipped
        self._ticks = 0
        self._held = 0
        self._evictable = 0

    def __len__(self) -> int:
        return self._held

    @property
    def evictable(self) -> int:
        """Blocks that can be evicted now, one after the other."""
        return self._evictable

    def hashes(self) -> Iterator[BlockHash]:
        """Every block held, in no order."""
        return (node.block_hash for node in self._nodes.values() if node.page is not None)

    def get(self, block_hash: BlockHash) -> PageId | None:
        """The page that holds the block."""
        node = self._nodes.get(block_hash)
        return None if node is None else node.page

    def insert(self, block_hash: BlockHash, page: PageId, parent: BlockHash | None) -> None:
        """Add a block that is not held, referenced from the start."""
        node = self._add(block_hash, page, parent)
        node.referenced = True
        self._turned_busy(node)

    def insert_idle(self, blocks: Sequence[tuple[BlockHash, PageId, BlockHash | None]], now: float) -> None:
        """Add blocks (hash, page, parent) that are not held and that nobody references. Costs the same at any depth."""
        nodes = []
        for block_hash, page, parent in blocks:
            nodes.append(node := self._add(block_hash, page, parent))
            if node.busy_children:
                self._turned_busy(node)
            else:
                self._evictable += 1
        for node in nodes:  # afterwards, when all but the last of a chain have a child and are no leaves
            if node.children:  # as ``_use``, without the call
                self._ticks = node.tick = self._ticks + 1
                node.used_at = now
            else:
                self._use(node, now)

    def touch(self, block_hash: BlockHash, now: float) -> None:
        """Note a use of an unreferenced block that is over already."""
        node = self._nodes[block_hash]
        assert not node.referenced, f"block {block_hash.hex()} is referenced"
        self._use(node, now)

    def replace(self, block_hash: BlockHash, page: PageId) -> None:
        """Let another page hold a block that is held and referenced."""
        node = self._nodes[block_hash]
        assert node.referenced, f"block {block_hash.hex()} is not referenced"
        node.page = page

    def hold(self, block_hash: BlockHash) -> None:
        """Note that an unreferenced block has a reference now."""
        node = self._nodes[block_hash]
        assert not node.referenced, f"block {block_hash.hex()} is already referenced"
        was_busy = node.busy
        node.referenced = True
        if not was_busy:
            self._evictable -= 1
            self._turned_busy(node)

    def rest(self, block_hash: BlockHash, now: float) -> None:
        """Note that the last reference to a block is gone."""
        node = self._nodes[block_hash]
        assert node.referenced, f"block {block_hash.hex()} is not referenced"
        node.referenced = False
        if not node.busy:
            self._evictable += 1
            self._turned_idle(node)
        self._use(node, now)

    def evict(self, count: int = 1) -> list[Evicted]:
        """Drop the least recently used leaves that nobody references, one after the other.

        Raises:
            LookupError: There are fewer than ``count``; what there was is gone.
        """
        evicted: list[Evicted] = []
        while len(evicted) < count:
            node: _Node | None = self._oldest_leaf()
            while node is not None and len(evicted) < count:
                assert node.page is not None
                evicted.append(Evicted(node.block_hash, node.page, node.used_at))
                node = self._remove(node)
            if node is not None:
                self._push_leaf(node)
        return evicted

    def _oldest_leaf(self) -> _Node:
        while self._leaves:
            tick, block_hash = heapq.heappop(self._leaves)
            node = self._nodes.get(block_hash)
            if node is not None and node.tick == tick and self._is_idle_leaf(node):
                return node
        raise LookupError("nothing can be evicted")

    def drop(self, block_hash: BlockHash) -> PageId:
        """Take a held block out wherever it stands, referenced or not; returns its page."""
        node = self._nodes[block_hash]
        page = node.page
        assert page is not None, f"block {block_hash.hex()} is not held"
        if node.busy:
            self._turned_idle(node)
        else:
            self._evictable -= 1
        node.page, node.referenced = None, False
        self._held -= 1
        parent, node.parent = node.parent, None
        if node.children == 0:
            del self._nodes[block_hash]
        if parent is not None and self._lost_child(above := self._nodes[parent]):
            self._push_leaf(above)
        return page

    def recount(self) -> tuple[int, int]:
        """(blocks held, blocks evictable) counted from scratch, for ``check``."""
        busy: set[BlockHash] = set()
        for node in self._nodes.values():
            above: _Node | None = node if node.page is not None and node.referenced else None
            while above is not None and above.page is not None and above.block_hash not in busy:
                busy.add(above.block_hash)
                above = None if above.parent is None else self._nodes.get(above.parent)
        held = sum(node.page is not None for node in self._nodes.values())
        return held, held - len(busy)

    def _add(self, block_hash: BlockHash, page: PageId, parent: BlockHash | None) -> _Node:
        node = self._nodes.get(block_hash)
        if node is None:
            node = self._nodes[block_hash] = _Node(block_hash, parent, page)
        else:
            assert node.page is None, f"block {block_hash.hex()} is already held"
            node.page, node.parent = page, parent
        self._held += 1
        if parent is not None:
            # a parent may be unknown here: then its place is kept, so that it is no leaf once it comes
            above = self._nodes.get(parent)
            if above is None:
                above = self._nodes[parent] = _Node(parent)
            above.children += 1
        return node

    def _use(self, node: _Node, now: float) -> None:
        self._ticks = node.tick = self._ticks + 1
        node.used_at = now
        if not node.children:
            self._push_leaf(node)

    def _is_idle_leaf(self, node: _Node) -> bool:
        return node.page is not None and not node.referenced and node.children == 0

    def _remove(self, node: _Node) -> _Node | None:
        """Take a leaf out; returns its parent if that is the leaf to go next, without a way through the heap."""
        del self._nodes[node.block_hash]
        self._held -= 1
        self._evictable -= 1
        if node.parent is None:
            return None
        parent = self._nodes[node.parent]
        if not self._lost_child(parent):
            return None
        if not self._leaves or (parent.tick, parent.block_hash) <= self._leaves[0]:
            return parent
        self._push_leaf(parent)
        return None

    def _lost_child(self, parent: _Node) -> bool:
        """Count a child less; whether ``parent`` has become an idle leaf, with its own, older or newer, last use."""
        parent.children -= 1
        if parent.children:
            return False
        if parent.page is None:
            del self._nodes[parent.block_hash]
            return False
        return not parent.referenced

    def _push_leaf(self, node: _Node) -> None:
        heapq.heappush(self._leaves, (node.tick, node.block_hash))
        if len(self._leaves) > 2 * len(self._nodes) + 1024:  # hits and releases leave dead entries behind
            self._leaves = [(n.tick, n.block_hash) for n in self._nodes.values() if self._is_idle_leaf(n)]
            heapq.heapify(self._leaves)

    def _turned_busy(self, node: _Node) -> None:
        """Tell the chain above that ``node`` became busy."""
        while node.parent is not None:
            parent = self._nodes[node.parent]
            was_busy = parent.busy
            parent.busy_children += 1
            if parent.page is None or was_busy:
                return
            self._evictable -= 1
            node = parent

    def _turned_idle(self, node: _Node) -> None:
        """Tell the chain above that ``node`` is no longer busy."""
        while node.parent is not None:
            parent = self._nodes[node.parent]
            parent.busy_children -= 1
            if parent.page is None or parent.busy:
                return
            self._evictable += 1
            node = parent
