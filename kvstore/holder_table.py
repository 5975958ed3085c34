"""From a block's hash to the set of its holders, in flat arrays: some 60 bytes a block however many hold it.

A dictionary takes twice that for a key of 16 bytes, and a set for each holder as much again. Here a block is three
64-bit numbers: two for its hash, and a bit for each of up to 64 holders; every further 64 holders cost one more. They
lie side by side: of a large table nothing is in any cache, and up to 384 holders' slots are one line each of it. Open
addressing with linear probing; hashes are random already, so their low bits are the place to begin. Work on the whole
table (growing, forgetting a holder, loading a snapshot) runs in numpy, and looking a chain up in ``prefix_lookup.c``
where that was compiled. Not thread-safe.
"""

from __future__ import annotations

import importlib
import struct
from array import array
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import xor
from types import ModuleType
from typing import Final

import numpy as np
import numpy.typing as npt
from epdserve.kvstore.set_digest import fold, packed
from epdserve.kvstore.types import BLOCK_HASH_BYTES, BlockHash

_PAIR: Final = struct.Struct("<QQ")
_WORD_BITS: Final = 64
_KEY_WORDS: Final = 2
_LINE_WORDS: Final = 8  # of a cache's line
_MIN_CAPACITY: Final = 1024
_MAX_LOAD: Final = 0.625  # of slots in use; a miss then looks at 4 on average
_NEW_LOAD: Final = 0.5  # at most, after a rebuild; at least half of it, which is 96 bytes a block
_BULK: Final = 4096  # hashes from which numpy beats a loop
_LONG: Final = 48  # blocks from which looking all of them up together is faster, even if few are known

# Low words are stored turned by this, so that a pair of zeros is an empty slot. The one hash that would be stored as
# zeros is never remembered; nobody will meet it.
_TURN: Final = 0x9E3779B97F4A7C15
_ROUNDS: Final = 2  # in which the whole chain is looked for; most hashes are found then

_NOTHING: Final = (0, 0, 0)

_VERSION: Final = 1  # of prefix_lookup.c: a module left over from another version is not used


def _load() -> ModuleType | None:
    """The compiled walk over a table, where the package was installed with a C compiler."""
    try:
        module = importlib.import_module("epdserve.kvstore._prefix_lookup")
    except ImportError:
        return None
    return module if module.VERSION == _VERSION else None


_native = _load()

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
        return 8 * len(self._slots)

    def holders(self, hashes: Sequence[BlockHash]) -> Iterator[int]:
        """Bit mask of the holders of each block in turn, 0 for an unknown one."""
        slots, base, stride, mask, words = self._slots, self._base, self._stride, self._mask, self._words
        for low, high in _pairs(hashes, keep_length=True):
            low ^= _TURN
            slot = low & mask
            at = base + slot * stride
            while (found := slots[at]) != low or slots[at + 1] != high:
                if not found and not slots[at + 1]:
                    break
                slot = (slot + 1) & mask
                at = base + slot * stride
            else:
                yield slots[at + 2] if words == 1 else self._all_bits(at)
                continue
            yield 0

    def prefix_lengths(self, hashes: Sequence[BlockHash], names: list[str]) -> dict[str, int]:
        """How many blocks of a chain each holder has from its start on, without those who have none.

        Args:
            names: What holders are called, by their numbers.
        """
        if _native is not None:
            chain = hashes if isinstance(hashes, list) else list(hashes)
            found: dict[str, int] = _native.prefix_lengths(
                self._slots, self._base, self._stride, self._mask, _TURN, chain, names
            )
            return found
        if len(hashes) >= _LONG:
            return self._prefix_lengths_of_many(hashes, names)
        lengths: dict[str, int] = {}
        alive = 0
        for length, holders in enumerate(self.holders(hashes)):
            if length:
                _note(lengths, names, alive & ~holders, length)
            alive = alive & holders if length else holders
            if not alive:
                return lengths
        _note(lengths, names, alive, len(hashes))
        return lengths

    def _prefix_lengths_of_many(self, hashes: Sequence[BlockHash], names: list[str]) -> dict[str, int]:
        """For chains of dozens of blocks and more: all are looked up together."""
        if not next(self.holders(hashes[:1])):
            return {}
        pairs = np.frombuffer(_joined(hashes, keep_length=True), "<u8").reshape(-1, 2)
        slots = self._find_soon(pairs[:, 0] ^ np.uint64(_TURN), pairs[:, 1])
        if not len(slots):
            return {}
        held = np.bitwise_and.accumulate(self._table().take(slots, axis=0)[:, _KEY_WORDS:], axis=0)
        # Holders drop out at a few places; in between, all that hold a block hold the next one
        ends = np.unique(np.flatnonzero(held[1:] != held[:-1]) // self._words) + 1
        ends = np.append(ends, len(slots))
        lost = held[ends - 1]
        lost[:-1] ^= held[ends[:-1]]
        flags = np.unpackbits(lost.astype("<u8", copy=False).view(np.uint8), bitorder="little")
        places, holders = np.divmod(np.flatnonzero(flags.view(np.bool_)), self._words * _WORD_BITS)
        lengths = zip(holders.tolist(), ends[places].tolist(), strict=True)
        return {names[holder]: length for holder, length in lengths}

    def add(self, holder: int, hashes: Sequence[BlockHash]) -> None:
        """Note that a holder has blocks."""
        self._make_room_for(holder)
        if len(hashes) >= _BULK:
            self._add_in_bulk(holder, hashes)
            return
        self._reserve(len(hashes))
        slots, base, stride, mask = self._slots, self._base, self._stride, self._mask
        word, bit = _KEY_WORDS + holder // _WORD_BITS, 1 << holder % _WORD_BITS
        alone = self._words == 1  # no other word can hold a bit of the slot
        count, all_lows, all_highs = self._folds.get(holder, _NOTHING)
        for low, high in _pairs(hashes):
            low ^= _TURN
            if not (low or high):
                continue
            slot = low & mask
            at, dead = base + slot * stride, -1
            while (found := slots[at]) != low or slots[at + 1] != high:
                if not found and not slots[at + 1]:
                    if dead < 0:
                        self._used += 1
                    else:
                        at = dead
                    slots[at], slots[at + 1] = low, high
                    break
                if dead < 0 and not slots[at + word] and (alone or not self._all_bits(at)):
                    dead = at
                slot = (slot + 1) & mask
                at = base + slot * stride
            held = slots[at + word]
            if not held and (alone or not self._all_bits(at)):
                self._live += 1
            if not held & bit:
                slots[at + word] = held | bit
                count, all_lows, all_highs = count + 1, all_lows ^ low, all_highs ^ high
        self._folds[holder] = count, all_lows, all_highs

    def discard(self, holder: int, hashes: Sequence[BlockHash]) -> None:
        """Note that a holder has blocks no more; those it never had are ignored."""
        if holder >= self._words * _WORD_BITS:
            return
        slots, base, stride, mask = self._slots, self._base, self._stride, self._mask
        word, bit = _KEY_WORDS + holder // _WORD_BITS, 1 << holder % _WORD_BITS
        alone = self._words == 1
        count, all_lows, all_highs = self._folds.get(holder, _NOTHING)
        for low, high in _pairs(hashes):
            low ^= _TURN
            slot = low & mask
            at = base + slot * stride
            while (found := slots[at]) != low or slots[at + 1] != high:
                if not found and not slots[at + 1]:
                    break
                slot = (slot + 1) & mask
                at = base + slot * stride
            else:
                held = slots[at + word]
                if held & bit:
                    slots[at + word] = held = held ^ bit
                    count, all_lows, all_highs = count - 1, all_lows ^ low, all_highs ^ high
                    if not held and (alone or not self._all_bits(at)):
                        self._live -= 1
        self._folds[holder] = count, all_lows, all_highs

    def clear(self, holder: int) -> None:
        """Note that a holder has nothing."""
        self._folds.pop(holder, None)
        if holder < self._words * _WORD_BITS:
            bits = self._table()[:, _KEY_WORDS:]
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
        self._mask, self._stride = capacity - 1, _KEY_WORDS + self._words
        # array gives plain ints faster than numpy does; numpy looks at the same memory for whole-table work
        self._slots = array("Q", bytes(8 * (capacity * self._stride + _LINE_WORDS - 1)))
        self._base = -(self._slots.buffer_info()[0] // 8) % _LINE_WORDS

    def _all_bits(self, at: int) -> int:
        words = self._slots[at + _KEY_WORDS : at + self._stride]
        return sum(held << _WORD_BITS * word for word, held in enumerate(words))

    def _table(self) -> Words:
        """(slots, words): low and high word, then bits."""
        count = (self._mask + 1) * self._stride
        return np.frombuffer(self._slots, np.uint64, count, 8 * self._base).reshape(-1, self._stride)

    def _make_room_for(self, holder: int) -> None:
        if holder >= self._words * _WORD_BITS:
            narrow = self._table()
            self._words = holder // _WORD_BITS + 1
            self._allocate(len(narrow))
            self._table()[:, : narrow.shape[1]] = narrow

    def _reserve(self, more: int) -> None:
        if self._used + more > _MAX_LOAD * (self._mask + 1):
            self._rebuild(more)

    def _add_in_bulk(self, holder: int, hashes: Sequence[BlockHash]) -> None:
        pairs = np.frombuffer(_joined(hashes), "<u8").reshape(-1, 2)
        low, high = pairs[:, 0] ^ np.uint64(_TURN), pairs[:, 1]
        slots = self._find(low, high)
        known = slots >= 0
        table, word = self._table(), _KEY_WORDS + holder // _WORD_BITS
        known &= (low != 0) | (high != 0)
        at = np.unique(slots[known])
        at = at[(table[at, word] & _bit(holder)) == 0]
        table[at, word] |= _bit(holder)
        fresh = np.unique(np.stack((low[~known], high[~known]), axis=1), axis=0)
        fresh = fresh[fresh.any(axis=1)]
        parts = (
            self._folds.get(holder, _NOTHING),
            fold(table[at, 0], table[at, 1]),
            fold(fresh[:, 0], fresh[:, 1]),
        )
        counts, all_lows, all_highs = zip(*parts, strict=True)
        self._folds[holder] = sum(counts), reduce(xor, all_lows), reduce(xor, all_highs)
        self._rebuild(0, fresh, holder)

    def _find_soon(self, low: Words, high: Words) -> npt.NDArray[np.int64]:
        """Slots of a chain's blocks up to the first unknown one.

        All are looked for in the first places together; the few that are not there, one by one.
        """
        plain, flat, mask = self._slots, np.frombuffer(self._slots, np.int64), self._mask
        base, stride = self._base, self._stride
        wanted = low.view(np.int64)
        slots = wanted & mask
        found = flat.take(base + slots * stride)  # some times faster than ``flat[...]``
        pending = np.flatnonzero((found != wanted) & (found != 0))
        for _ in range(_ROUNDS):
            slots[pending] = at = (slots.take(pending) + 1) & mask
            found = flat.take(base + at * stride)
            pending = pending[(found != wanted.take(pending)) & (found != 0)]
        for index in pending.tolist():
            key, slot = int(low[index]), int(slots[index])
            while (seen := plain[base + slot * stride]) != key and seen:
                slot = (slot + 1) & mask
            slots[index] = slot
        places = base + slots * stride
        there = flat.take(places) == wanted
        there &= flat.take(places + 1) == high.view(np.int64)
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
        table = self._table()
        slots = np.full(len(low), -1, np.int64)
        pending = np.arange(len(low))
        at = (low & np.uint64(self._mask)).astype(np.int64)
        while len(pending):
            here_low, here_high = table[at, 0], table[at, 1]
            hit = (here_low == low[pending]) & (here_high == high[pending])
            slots[pending[hit]] = at[hit]
            go_on = ~hit & ((here_low != 0) | (here_high != 0))
            pending, at = pending[go_on], (at[go_on] + 1) & self._mask
        return slots

    def _rebuild(self, more: int, fresh: Words | None = None, holder: int = 0) -> None:
        """Move to a table with room for ``more``, without dead slots and with ``fresh`` hashes of a holder."""
        table = self._table()
        kept = table[table[:, _KEY_WORDS:].any(axis=1)]
        if fresh is not None:
            new = np.zeros((len(fresh), self._stride), np.uint64)
            new[:, :_KEY_WORDS] = fresh
            new[:, _KEY_WORDS + holder // _WORD_BITS] = _bit(holder)
            kept = np.concatenate((kept, new))
        capacity = _MIN_CAPACITY
        while len(kept) + more > _NEW_LOAD * capacity:
            capacity *= 2
        self._allocate(capacity)
        self._live = self._used = len(kept)
        order, slots = _places(kept[:, 0], capacity)
        self._table()[slots] = kept[order]


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


def _note(lengths: dict[str, int], names: list[str], holders: int, length: int) -> None:
    while holders:
        lengths[names[(holders & -holders).bit_length() - 1]] = length
        holders &= holders - 1


def _bit(holder: int) -> np.uint64:
    return np.uint64(1 << holder % _WORD_BITS)
