"""From a block's hash to the set of its holders, in flat arrays: some 60 bytes a block however many hold it.

A dictionary takes twice that for a key of 16 bytes, and a set for each holder as much again. Here a block is three
64-bit numbers: two for its hash, and a bit for each of up to 64 holders; every further 64 holders cost one more. Open
addressing with linear probing; hashes are random already, so their low bits are the place to begin. Work on the whole
table (growing, forgetting a holder, loading a snapshot) runs in numpy. Not thread-safe.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import xor
from typing import Final

import numpy as np
import numpy.typing as npt
from epdserve.kvstore.set_digest import fold, packed
from epdserve.kvstore.types import BLOCK_HASH_BYTES, BlockHash

_PAIR: Final = struct.Struct("<QQ")
_WORD_BITS: Final = 64
_MIN_CAPACITY: Final = 1024
_MAX_LOAD: Final = 0.625  # of slots in use; a miss then looks at 4 on average
_NEW_LOAD: Final = 0.5  # at most, after a rebuild; at least half of it, which is 96 bytes a block
_BULK: Final = 4096  # hashes from which numpy beats a loop

# Low words are stored turned by this, so that a pair of zeros is an empty slot. The one hash that would be stored as
# zeros is never remembered; nobody will meet it.
_TURN: Final = 0x9E3779B97F4A7C15
_ROUNDS: Final = 2  # in which the whole chain is looked for; most hashes are found then

_NOTHING: Final = (0, 0, 0)

Words = npt.NDArray[np.uint64]


class HolderTable:
    """Which holders, small numbers, have which block. Hashes that are not 16 bytes long are taken for unknown."""

    def __init__(self) -> None:
        self._live = 0  # slots with a holder
        self._used = 0  # slots with a hash; those without a holder are kept for probing and reused
        self._words = 1
        self._folds: dict[
            int, tuple[int, int, int]
        ] = {}  # of what each holder has: count, low and high words
        self._allocate(_MIN_CAPACITY)

    def __len__(self) -> int:
        return self._live

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return 8 * (2 + self._words) * (self._mask + 1)

    def holders(self, hashes: Sequence[BlockHash]) -> Iterator[int]:
        """Bit mask of the holders of each block in turn, 0 for an unknown one."""
        lows, highs, bits, mask, words = self._lows, self._highs, self._bits, self._mask, self._words
        for low, high in _pairs(hashes, keep_length=True):
            low ^= _TURN
            slot = low & mask
            while (found := lows[slot]) != low or highs[slot] != high:
                if not found and not highs[slot]:
                    break
                slot = (slot + 1) & mask
            else:
                yield bits[slot] if words == 1 else self._all_bits(slot)
                continue
            yield 0

    def prefix_lengths(self, hashes: Sequence[BlockHash]) -> dict[int, int]:
        """How many blocks of a chain each holder has from its start on, without those who have none.

        For chains of dozens of blocks and more: all are looked up together.
        """
        pairs = np.frombuffer(_joined(hashes, keep_length=True), "<u8").reshape(-1, 2)
        slots = self._find_soon(pairs[:, 0] ^ np.uint64(_TURN), pairs[:, 1])
        if not len(slots):
            return {}
        _, _, bits = self._arrays()
        held = np.bitwise_and.accumulate(bits.take(slots, axis=0), axis=0)
        # Holders drop out at a few places; in between, all that hold a block hold the next one
        ends = np.unique(np.flatnonzero(held[1:] != held[:-1]) // self._words) + 1
        ends = np.append(ends, len(slots))
        lost = held[ends - 1]
        lost[:-1] ^= held[ends[:-1]]
        flags = np.unpackbits(lost.astype("<u8", copy=False).view(np.uint8), bitorder="little")
        places, holders = np.divmod(np.flatnonzero(flags.view(np.bool_)), self._words * _WORD_BITS)
        return dict(zip(holders.tolist(), ends[places].tolist(), strict=True))

    def add(self, holder: int, hashes: Sequence[BlockHash]) -> None:
        """Note that a holder has blocks."""
        self._make_room_for(holder)
        if len(hashes) >= _BULK:
            self._add_in_bulk(holder, hashes)
            return
        self._reserve(len(hashes))
        lows, highs, mask, words = self._lows, self._highs, self._mask, self._words
        bits, word, bit = self._bits, holder // _WORD_BITS, 1 << holder % _WORD_BITS
        alone = words == 1  # no other word can hold a bit of the slot
        count, all_lows, all_highs = self._folds.get(holder, _NOTHING)
        for low, high in _pairs(hashes):
            low ^= _TURN
            if not (low or high):
                continue
            slot = low & mask
            dead = -1
            while (found := lows[slot]) != low or highs[slot] != high:
                if not found and not highs[slot]:
                    if dead < 0:
                        self._used += 1
                    else:
                        slot = dead
                    lows[slot], highs[slot] = low, high
                    break
                if dead < 0 and not bits[slot * words + word] and (alone or not self._all_bits(slot)):
                    dead = slot
                slot = (slot + 1) & mask
            held = bits[at := slot * words + word]
            if not held and (alone or not self._all_bits(slot)):
                self._live += 1
            if not held & bit:
                bits[at] = held | bit
                count, all_lows, all_highs = count + 1, all_lows ^ low, all_highs ^ high
        self._folds[holder] = count, all_lows, all_highs

    def discard(self, holder: int, hashes: Sequence[BlockHash]) -> None:
        """Note that a holder has blocks no more; those it never had are ignored."""
        if holder >= self._words * _WORD_BITS:
            return
        lows, highs, mask, words = self._lows, self._highs, self._mask, self._words
        bits, word, bit = self._bits, holder // _WORD_BITS, 1 << holder % _WORD_BITS
        alone = words == 1
        count, all_lows, all_highs = self._folds.get(holder, _NOTHING)
        for low, high in _pairs(hashes):
            low ^= _TURN
            slot = low & mask
            while (found := lows[slot]) != low or highs[slot] != high:
                if not found and not highs[slot]:
                    break
                slot = (slot + 1) & mask
            else:
                held = bits[at := slot * words + word]
                if held & bit:
                    bits[at] = held = held ^ bit
                    count, all_lows, all_highs = count - 1, all_lows ^ low, all_highs ^ high
                    if not held and (alone or not self._all_bits(slot)):
                        self._live -= 1
        self._folds[holder] = count, all_lows, all_highs

    def clear(self, holder: int) -> None:
        """Note that a holder has nothing."""
        self._folds.pop(holder, None)
        if holder < self._words * _WORD_BITS:
            _, _, bits = self._arrays()
            bits[:, holder // _WORD_BITS] &= ~_bit(holder)
            self._live = int(np.count_nonzero(bits.any(axis=1)))
            if self._live < self._mask // 8:
                self._rebuild(0)

    def digest(self, holder: int) -> bytes:
        """Digest of what a holder has (``set_digest``), kept up with each block that comes and goes."""
        count, low, high = self._folds.get(holder, _NOTHING)
        return packed(count, low ^ (_TURN if count % 2 else 0), high)

    # -- inside ---------------------------------------------------------------------------------------------

    def _allocate(self, capacity: int) -> None:
        self._mask = capacity - 1
        # array gives plain ints faster than numpy does; numpy looks at the same memory for whole-table work
        self._lows, self._highs = (array("Q", bytes(8 * capacity)) for _ in range(2))
        # All words of a slot side by side: of a large table, little more than a line of it is in no cache yet
        self._bits = array("Q", bytes(8 * capacity * self._words))

    def _all_bits(self, slot: int) -> int:
        first = slot * self._words
        words = self._bits[first : first + self._words]
        return sum(held << _WORD_BITS * word for word, held in enumerate(words))

    def _arrays(self) -> tuple[Words, Words, Words]:
        """Low and high words, and bits: (slots, words)."""
        return (
            np.frombuffer(self._lows, np.uint64),
            np.frombuffer(self._highs, np.uint64),
            np.frombuffer(self._bits, np.uint64).reshape(-1, self._words),
        )

    def _make_room_for(self, holder: int) -> None:
        if holder >= self._words * _WORD_BITS:
            _, _, narrow = self._arrays()
            self._words = holder // _WORD_BITS + 1
            self._bits = array("Q", bytes(8 * len(narrow) * self._words))
            _, _, wide = self._arrays()
            wide[:, : narrow.shape[1]] = narrow

    def _reserve(self, more: int) -> None:
        if self._used + more > _MAX_LOAD * (self._mask + 1):
            self._rebuild(more)

    def _add_in_bulk(self, holder: int, hashes: Sequence[BlockHash]) -> None:
        pairs = np.frombuffer(_joined(hashes), "<u8").reshape(-1, 2)
        low, high = pairs[:, 0] ^ np.uint64(_TURN), pairs[:, 1]
        slots = self._find(low, high)
        known = slots >= 0
        lows, highs, bits = self._arrays()
        known &= (low != 0) | (high != 0)
        at = np.unique(slots[known])
        at = at[(bits[at, holder // _WORD_BITS] & _bit(holder)) == 0]
        bits[at, holder // _WORD_BITS] |= _bit(holder)
        fresh = np.unique(np.stack((low[~known], high[~known]), axis=1), axis=0)
        fresh = fresh[fresh.any(axis=1)]
        parts = (self._folds.get(holder, _NOTHING), fold(lows[at], highs[at]), fold(fresh[:, 0], fresh[:, 1]))
        counts, all_lows, all_highs = zip(*parts, strict=True)
        self._folds[holder] = sum(counts), reduce(xor, all_lows), reduce(xor, all_highs)
        self._rebuild(0, fresh, holder)

    def _find_soon(self, low: Words, high: Words) -> npt.NDArray[np.int64]:
        """Slots of a chain's blocks up to the first unknown one.

        All are looked for in the first places together; the few that are not there, one by one.
        """
        lows, mask = np.frombuffer(self._lows, np.int64), self._mask
        wanted = low.view(np.int64)
        slots = wanted & mask
        found = lows.take(slots)  # some times faster than ``lows[slots]``
        pending = np.flatnonzero((found != wanted) & (found != 0))
        for _ in range(_ROUNDS):
            slots[pending] = at = (slots.take(pending) + 1) & mask
            found = lows.take(at)
            pending = pending[(found != wanted.take(pending)) & (found != 0)]
        for index in pending.tolist():
            key, slot = int(wanted[index]), int(slots[index])
            while lows[slot] != key and lows[slot]:
                slot = (slot + 1) & mask
            slots[index] = slot
        there = lows.take(slots) == wanted
        there &= np.frombuffer(self._highs, np.uint64).take(slots) == high
        length = int(there.argmin())
        if not there[length]:
            slots = slots[:length]
            # It may be behind another hash with the same low word, or its low word is zero: looked for with care
            if self._find(low[length : length + 1], high[length : length + 1])[0] >= 0:
                found = self._find(low, high)
                return found[: int(np.append(found, -1).argmin())]
        return slots

    def _find(self, low: Words, high: Words) -> npt.NDArray[np.int64]:
        """Slot of each hash, -1 for an unknown one."""
        lows, highs, _ = self._arrays()
        slots = np.full(len(low), -1, np.int64)
        pending = np.arange(len(low))
        at = (low & np.uint64(self._mask)).astype(np.int64)
        while len(pending):
            here_low, here_high = lows[at], highs[at]
            hit = (here_low == low[pending]) & (here_high == high[pending])
            slots[pending[hit]] = at[hit]
            go_on = ~hit & ((here_low != 0) | (here_high != 0))
            pending, at = pending[go_on], (at[go_on] + 1) & self._mask
        return slots

    def _rebuild(self, more: int, fresh: Words | None = None, holder: int = 0) -> None:
        """Move to a table with room for ``more``, without dead slots and with ``fresh`` hashes of a holder."""
        lows, highs, bits = self._arrays()
        live = bits.any(axis=1)
        low, high, held = lows[live], highs[live], bits[live]
        if fresh is not None:
            low, high = np.concatenate((low, fresh[:, 0])), np.concatenate((high, fresh[:, 1]))
            new = np.zeros((len(fresh), self._words), np.uint64)
            new[:, holder // _WORD_BITS] = _bit(holder)
            held = np.concatenate((held, new))
        capacity = _MIN_CAPACITY
        while len(low) + more > _NEW_LOAD * capacity:
            capacity *= 2
        self._allocate(capacity)
        self._live = self._used = len(low)
        order, slots = _places(low, capacity)
        for source, target in zip((low, high, held), self._arrays(), strict=True):
            target[slots] = source[order]


def _places(low: Words, capacity: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where linear probing puts hashes into an empty table: an order of them, and the slot of each in it."""
    home = (low & np.uint64(capacity - 1)).astype(np.int64)
    order = np.argsort(home, kind="stable")
    # each goes right behind the one before it, or to its own place if that is further on
    ranks = np.arange(len(home))
    slots = np.maximum.accumulate(home[order] - ranks) + ranks
    over = int(np.count_nonzero(slots >= capacity))
    if over:  # what runs over the end goes on from the start, into the first free places there
        first = slots[: len(slots) - over]
        window = np.ones(len(slots), bool)
        window[first[first < len(window)]] = False
        slots[len(slots) - over :] = np.flatnonzero(window)[:over]
    return order, slots


def _pairs(hashes: Sequence[BlockHash], *, keep_length: bool = False) -> Iterator[tuple[int, int]]:
    return _PAIR.iter_unpack(_joined(hashes, keep_length=keep_length))


def _joined(hashes: Sequence[BlockHash], *, keep_length: bool = False) -> bytes:
    joined = b"".join(hashes)
    if len(joined) == BLOCK_HASH_BYTES * len(hashes):
        return joined
    unknown = _PAIR.pack(_TURN, 0) if keep_length else b""
    return b"".join(h if len(h) == BLOCK_HASH_BYTES else unknown for h in hashes)


def _bit(holder: int) -> np.uint64:
    return np.uint64(1 << holder % _WORD_BITS)
