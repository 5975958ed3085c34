"""What a reader of the host cache holds while it reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from epdserve.kvstore.block_header import BlockHeader
from epdserve.kvstore.slots import Slot
from epdserve.kvstore.staging import Bytes
from epdserve.kvstore.types import BlockHash, BlockOwner


@dataclass(slots=True, eq=False)
class Entry:
    """A block of the cache and how many read it; owned by the cache, under its lock."""

    header: BlockHeader
    slot: Slot
    pins: int = 0
    parent: BlockHash | None = None
    owner: BlockOwner | None = None


class _Cache(Protocol):
    def release(self, pinned: Iterable[PinnedBlock]) -> None: ...


class PinnedBlock:
    """A block whose bytes stay until ``release``. For one thread at a time; a context manager.

    For a peer that is to read it, keep the pin as long as its lease: ``slot.index`` is its place in the pool's region.
    """

    __slots__ = ("_cache", "_entry", "page")

    def __init__(self, cache: _Cache, entry: Entry, page: Bytes) -> None:
        self._cache = cache
        self._entry: Entry | None = entry
        self.page = page
        """(slot_bytes,) uint8: payload, header, padding; read-only."""

    @property
    def header(self) -> BlockHeader:
        """What the block says of itself."""
        return self._held().header

    @property
    def slot(self) -> Slot:
        """Where it lies."""
        return self._held().slot

    @property
    def parent(self) -> BlockHash | None:
        """The block before it, if somebody said so."""
        return self._held().parent

    @property
    def owner(self) -> BlockOwner | None:
        """Whose it is, if somebody said so."""
        return self._held().owner

    def release(self) -> None:
        """Let go.

        Raises:
            ValueError: Released already.
        """
        self._cache.release((self,))

    def end(self) -> Entry:
        """For the cache: the entry, once."""
        entry = self._held()
        self._entry = None
        return entry

    def _held(self) -> Entry:
        if self._entry is None:
            raise ValueError("this block was released already")
        return self._entry

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
