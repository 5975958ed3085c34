"""Free list, reference counts and generations of page ids.

The page that was freed longest ago is handed out first, so that whatever still reads or writes a page it lost
seldom meets the next owner. Not thread-safe; owned by ``BlockManager``.
"""

from __future__ import annotations

from collections import deque

from epdserve.kvstore.types import PageId


class PageAllocator:
    """Counts and hands out pages; knows nothing of what they hold."""

    def __init__(self, num_pages: int) -> None:
        if num_pages <= 0:
            raise ValueError(f"num_pages must be positive, got {num_pages}")
        self.num_pages = num_pages
        self._free: deque[PageId] = deque(PageId(page) for page in range(num_pages))
        self._references = [0] * num_pages
        self._generations = [0] * num_pages

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def free_pages(self) -> tuple[PageId, ...]:
        """Free pages, the next to be handed out first."""
        return tuple(self._free)

    def take(self) -> PageId:
        """Hand out the least recently freed page, with a new generation and no references."""
        page = self._free.popleft()
        self._generations[page] += 1
        return page

    def give_back(self, page: PageId) -> None:
        """Put a page at the end of the free list."""
        assert self._references[page] == 0, f"page {page} freed with {self._references[page]} references"
        self._free.append(page)

    def generation(self, page: PageId) -> int:
        """How often the page has been handed out."""
        return self._generations[page]

    def references(self, page: PageId) -> int:
        """Present references to the page."""
        return self._references[page]

    def add_reference(self, page: PageId) -> None:
        """Count one more user of the page."""
        self._references[page] += 1

    def drop_reference(self, page: PageId) -> int:
        """Count one user less; returns how many are left."""
        assert self._references[page] > 0, f"page {page} has no reference to drop"
        self._references[page] -= 1
        return self._references[page]
