"""Which blocks lie where: workers' pages, machines' host caches, their SSDs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from epdserve.loadtest.simulator.requests import BLOCK_TOKENS

TIERS = ("pages", "host", "ssd", "peers")


class _Lru:
    """Blocks of one place, and its bit in a table of holders."""

    def __init__(self, bit: int, capacity: int, holders: dict[int, int]) -> None:
        self._bit = bit
        self._capacity = capacity
        self._holders = holders
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):  # leaves are older than their parents, and go first
            if block in self._blocks:
                self._blocks.move_to_end(block)
            else:
                self._blocks[block] = None
                self._holders[block] = self._holders.get(block, 0) | self._bit
        self._shrink(self._capacity)

    def clear(self) -> None:
        self._shrink(0)

    def _shrink(self, count: int) -> None:
        while len(self._blocks) > count:
            block, _ = self._blocks.popitem(last=False)
            left = self._holders[block] & ~self._bit
            if left:
                self._holders[block] = left
            else:
                del self._holders[block]


class Caches:
    """All tiers of all places.

    Args:
        machines: Machine of each prefill worker.
        pages_tokens, host_tokens: Room of a worker's pages and of a machine's host cache; SSDs hold everything.
    """

    def __init__(
        self, machines: Sequence[int], machine_count: int, *, pages_tokens: int, host_tokens: int
    ) -> None:
        self._machines = machines
        self._workers = len(machines)
        self._page_holders: dict[int, int] = {}
        self._host_holders: dict[int, int] = {}
        self._ssd_holders: dict[int, int] = {}
        pages, host = max(1, pages_tokens // BLOCK_TOKENS), max(1, host_tokens // BLOCK_TOKENS)
        self._pages = [_Lru(1 << worker, pages, self._page_holders) for worker in range(self._workers)]
        self._host = [_Lru(1 << machine, host, self._host_holders) for machine in range(machine_count)]
        self._workers_of = [0] * machine_count
        for worker, machine in enumerate(machines):
            self._workers_of[machine] |= 1 << worker
        self._expanded = {0: 0}

    def hits(self, blocks: Sequence[int]) -> npt.NDArray[np.float64]:
        """(tiers, prefill workers): leading tokens to be had from each tier and those before it."""
        lengths = np.zeros((4, self._workers))
        alive = [-1, -1, -1]
        length = 0
        for block in blocks:
            ssd = self._ssd_holders.get(block, 0)
            pages = self._page_holders.get(block, 0)
            if not (ssd or pages):
                break
            host = pages | self._workers_at(self._host_holders.get(block, 0))
            length += 1
            for tier, here in enumerate((pages, host, host | self._workers_at(ssd))):
                was = alive[tier]
                now = was & here
                if now != was:
                    if length > 1:
                        self._note(lengths[tier], was & ~now, length - 1)
                    alive[tier] = now
        everybody = (1 << self._workers) - 1
        for tier in range(3):
            self._note(lengths[tier], alive[tier] & everybody, length)
        lengths[3] = length
        return lengths * BLOCK_TOKENS

    def hits_at(self, worker: int, blocks: Sequence[int]) -> list[float]:
        """One worker's column of ``hits``, without the others."""
        page_bit, machine_bit = 1 << worker, 1 << self._machines[worker]
        lengths = [0, 0, 0, 0]
        reach = 0  # the lowest tier that has had all blocks so far
        for length, block in enumerate(blocks, start=1):
            pages = self._page_holders.get(block, 0)
            if pages & page_bit:
                tier = 0
            elif self._host_holders.get(block, 0) & machine_bit:
                tier = 1
            else:
                ssd = self._ssd_holders.get(block, 0)
                if not (ssd or pages):
                    break
                tier = 2 if ssd & machine_bit else 3
            reach = max(reach, tier)
            for at in range(reach, 4):
                lengths[at] = length
        return [float(length * BLOCK_TOKENS) for length in lengths]

    def fill(self, worker: int, blocks: Sequence[int]) -> None:
        """A prefill worker has made or fetched blocks; its machine's store has taken them."""
        self._pages[worker].add(blocks)
        self.store(self._machines[worker], blocks)

    def forget(self, worker: int) -> None:
        """A prefill worker's pages are lost; what its machine's store holds is not."""
        self._pages[worker].clear()

    def store(self, machine: int, blocks: Sequence[int]) -> None:
        """A machine's store takes blocks."""
        self._host[machine].add(blocks)
        bit = 1 << machine
        for block in blocks:
            self._ssd_holders[block] = self._ssd_holders.get(block, 0) | bit

    def _workers_at(self, machines: int) -> int:
        found = self._expanded.get(machines)
        if found is None:
            found = 0
            for machine, workers in enumerate(self._workers_of):
                if machines >> machine & 1:
                    found |= workers
            self._expanded[machines] = found
        return found

    @staticmethod
    def _note(row: npt.NDArray[np.float64], mask: int, length: int) -> None:
        while mask > 0:
            bit = mask & -mask
            row[bit.bit_length() - 1] = length
            mask ^= bit
