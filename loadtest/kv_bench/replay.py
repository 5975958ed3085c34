"""Hit rates of the store's retention at equal bytes against plain LRU: traces replayed on a virtual clock.

Memory is the page machine that workers use (leaves go first, the least recently used leaf of all first). Disk is the
tier's own decisions, watermarks, floor and refusals included, without the I/O. Plain LRU knows blocks and no chains:
it touches a prompt's blocks in order and drops the one unused for longest.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from epdserve.kvstore.blocks import BlockManager, Seal
from epdserve.kvstore.errors import OutOfPages
from epdserve.kvstore.ssd.retention import (
    Admission,
    HeldBlocks,
    RetentionPolicy,
    Space,
    admit,
    plan_eviction,
)
from epdserve.kvstore.types import BlockHash
from epdserve.loadtest.kv_bench.row import Row, Rows
from epdserve.loadtest.traces import BLOCK_TOKENS, TracedRequest, generate, read_mooncake

Access = Callable[[float, Sequence[int]], int]  # (time, blocks of a prompt) -> length of the hit in blocks
_SHARES: Final = (0.05, 0.2)  # of the bytes of all different blocks
_FLOOR_RATIO: Final = 0.1  # of the trace's time, so that a floor of days shows in a trace of an hour


def measure(traces: Path | None = None, *, conversations: int = 600) -> Rows:
    """Rows for the public traces in a folder, and for one that is made up."""
    named = {"made-up conversations": generate(1, conversations=conversations)}
    if traces is not None:
        for path in sorted(traces.glob("mooncake_*.jsonl*")):
            named[path.name.partition(".")[0]] = read_mooncake(path)
    for name, requests in named.items():
        different = len({block for request in requests for block in request.blocks})
        floor_s = int((requests[-1].at_s - requests[0].at_s) * _FLOOR_RATIO)
        for share in _SHARES:
            capacity = max(16, int(different * share))
            plain = hit_ratio(requests, PlainLru(capacity).access)
            for what, access in (
                ("pages and host cache", Pages(capacity).access),
                ("SSD, no floor", Disk(capacity, floor_s=0).access),
                (f"SSD, floor of {floor_s} s", Disk(capacity, floor_s=floor_s).access),
            ):
                row = f"hits, {name}, room for {share:.0%}: {what}"
                yield Row(row, 100 * hit_ratio(requests, access), "% of tokens", 100 * plain, "plain LRU")


def hit_ratio(requests: Sequence[TracedRequest], access: Access) -> float:
    """Share of prompt tokens found."""
    hits = tokens = 0
    for request in requests:
        full = request.blocks[: request.prompt_tokens // BLOCK_TOKENS]  # an open block is no block
        hits += BLOCK_TOKENS * access(request.at_s, full)
        tokens += request.prompt_tokens
    return hits / tokens


class PlainLru:
    """Blocks in order of last use."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[int, None] = OrderedDict()

    def access(self, at_s: float, blocks: Sequence[int]) -> int:
        """See ``Access``."""
        hit = _prefix(blocks, self._held)
        for block in blocks:
            self._held[block] = None
            self._held.move_to_end(block)
            if len(self._held) > self._capacity:
                self._held.popitem(last=False)
        return hit


class Pages:
    """The block manager of a worker; the host cache has the same order."""

    def __init__(self, capacity: int) -> None:
        self._now = 0.0
        self._blocks = BlockManager(capacity, self)

    def monotonic(self) -> float:
        """It is its own clock."""
        return self._now

    def access(self, at_s: float, blocks: Sequence[int]) -> int:
        """See ``Access``."""
        self._now = at_s
        hashes = [_name(block) for block in blocks]
        pages = self._blocks.match(hashes, exact=False)
        hit = len(pages)
        room = min(len(blocks) - hit, self._blocks.available())
        try:
            fresh = self._blocks.reserve(room)
        except OutOfPages:
            fresh = []
        names = hashes[hit : hit + len(fresh)]
        seals = [Seal(page, name, 0, True) for page, name in zip(fresh, names, strict=True)]
        if seals:
            pages += self._blocks.seal_chain(seals, parent=hashes[hit - 1] if hit else None)
        self._blocks.release(pages)
        return hit


class Disk:
    """Who may come in and who goes, as the SSD tier decides."""

    def __init__(self, capacity: int, *, floor_s: int) -> None:
        self._policy = RetentionPolicy(floor_s=floor_s, reserve_ratio=0.0)
        self._capacity, self._sequence = capacity, 0
        self._slots: dict[int, int] = {}
        self._free = list(range(capacity))
        self._key = np.zeros(capacity, np.uint64)
        self._parent = np.zeros(capacity, np.uint64)
        self._order = np.zeros(capacity, np.uint64)
        self._last_use = np.zeros(capacity, np.int64)
        self._nothing_before_s = -1  # a sweep before then finds nothing

    def access(self, at_s: float, blocks: Sequence[int]) -> int:
        """See ``Access``."""
        now = int(at_s) + 1
        hit = _prefix(blocks, self._slots)
        for place, block in enumerate(blocks):
            if block not in self._slots and not self._put(block, blocks[place - 1] if place else None, now):
                break  # what follows would be of no use
        held = [self._slots[block] for block in blocks if block in self._slots]
        self._last_use[held] = now
        return hit

    def _put(self, block: int, parent: int | None, now: int) -> bool:
        answer = self._admit(now)
        if answer is Admission.NO_SPACE and self._sweep(now):
            answer = self._admit(now)
        if answer is not Admission.ACCEPTED:
            return False
        slot = self._free.pop()
        self._sequence += 1
        self._slots[block] = slot
        self._key[slot], self._parent[slot] = block + 1, 0 if parent is None else parent + 1
        self._order[slot], self._last_use[slot] = self._sequence, now
        return True

    def _admit(self, now: int) -> Admission:
        space = Space(self._capacity, len(self._free), 0)
        answer, _ = admit(
            space,
            self._policy,
            tenant=b"",
            tenant_bytes=0,
            slot_bytes=1,
            running=False,
            nothing_may_go=now < self._nothing_before_s,
        )
        return answer

    def _sweep(self, now: int) -> int:
        slots = np.fromiter(self._slots.values(), np.int64, len(self._slots))
        blocks = list(self._slots)
        held = HeldBlocks(
            key=self._key[slots],
            parent=self._parent[slots],
            last_use=self._last_use[slots],
            tenant=np.zeros(len(slots), np.int64),
            reserve=np.zeros(len(slots), np.bool_),
            sequence=self._order[slots],
        )
        wanted = max(1, Space(self._capacity, len(self._free), 0).to_free(self._policy))
        plan = plan_eviction(held, self._policy, now_s=now, slots_wanted=wanted)
        for index in plan.order.tolist():
            self._free.append(self._slots.pop(blocks[index]))
        if not len(plan.order) and plan.next_due_s is not None:
            self._nothing_before_s = plan.next_due_s
        return len(plan.order)


def _prefix(blocks: Sequence[int], held: "OrderedDict[int, None] | dict[int, int]") -> int:
    for length, block in enumerate(blocks):
        if block not in held:
            return length
    return len(blocks)


def _name(block: int) -> BlockHash:
    return BlockHash(block.to_bytes(16, "little"))
