"""``BlockManager`` against a dictionary model: random steps, the same state after each."""

from __future__ import annotations

import pytest
from epdserve.kvstore.blocks import BlockManager
from epdserve.kvstore.errors import OutOfPages
from epdserve.kvstore.types import BlockHash, PageId
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule
from support.block_model import BlockModel, ModelBlock
from support.block_paths import chain, name, parent_of
from support.manual_clock import ManualClock

paths = st.text("ab", min_size=1, max_size=4)


class BlockMachine(RuleBasedStateMachine):
    """Random steps on a ``BlockManager`` and on the model; they must agree after each."""

    filling = Bundle("filling")
    late = Bundle("late")
    referenced = Bundle("referenced")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.blocks = BlockManager(6, self.clock)
        self.model = BlockModel(6)
        self.reader: set[BlockHash] = set()
        self.next_seq = 0

    @rule(target=filling, count=st.integers(0, 5))
    def reserve(self, count: int) -> object:
        return multiple(*self._reserve(count))

    @rule(target=referenced, page=filling, path=paths, exact=st.booleans(), checksum=st.integers(0, 9))
    def seal(self, page: PageId, path: str, exact: bool, checksum: int) -> object:
        if page not in self.model.filling:
            return multiple()
        return self._seal(page, path, exact, checksum)

    @rule(target=referenced, path=paths, exact=st.booleans())
    def match(self, path: str, exact: bool) -> object:
        return multiple(*self._match(path, exact))

    @rule(
        target=referenced,
        path=paths,
        exact=st.booleans(),
        order=st.permutations(range(4)),
        keep=st.booleans(),
    )
    def request(self, path: str, exact: bool, order: list[int], keep: bool) -> object:
        """A whole request: hit, fill the rest, release in any order or not yet. Brings eviction to work."""
        pages = self._match(path, exact)
        for end in range(len(pages) + 1, len(path) + 1):
            pages += [self._seal(page, path[:end], exact, 0) for page in self._reserve(1)]
        if keep:
            return multiple(*pages)
        for position in order:
            if position < len(pages):
                self.release(pages[position])
        return multiple()

    @rule(page=referenced)
    def forsake(self, page: PageId) -> None:
        while self._references(page):
            self.release(page)

    @rule(page=referenced)
    def release(self, page: PageId) -> None:
        if self._references(page):
            self.model.release(page)
            self.blocks.release([page])

    @rule(target=referenced, page=referenced)
    def pin(self, page: PageId) -> object:
        if not self._references(page):
            return multiple()
        if page in self.model.orphans:
            self.model.orphans[page] += 1
        else:
            next(b for b in self.model.blocks.values() if b.page == page).references += 1
        self.blocks.pin([page])
        return page

    @rule(page=filling)
    def abort(self, page: PageId) -> None:
        if page in self.model.filling:
            self.model.filling.remove(page)
            self.blocks.abort([page])

    @rule(target=late, page=filling)
    def quarantine(self, page: PageId) -> object:
        if page not in self.model.filling:
            return multiple()
        self.model.filling.remove(page)
        self.model.quarantined.add(page)
        self.blocks.quarantine([page])
        return page

    @rule(page=late)
    def transfer_over(self, page: PageId) -> None:
        if page in self.model.quarantined:
            self.model.quarantined.remove(page)
            self.blocks.transfer_over([page])

    @rule(dice=st.integers(0, 5))
    def forget_all(self, dice: int) -> None:
        if dice == 0:
            assert self.blocks.forget_all() == self.model.forget_all()

    @rule()
    def drain(self) -> None:
        events = self.blocks.drain_events()
        assert events.first_seq == self.next_seq
        self.next_seq = events.next_seq
        self.reader = (self.reader | set(events.added)) - set(events.removed)
        assert self.reader == set(self.model.blocks)

    @invariant()
    def adds_up(self) -> None:
        self.blocks.check()
        model, counts = self.model, self.blocks.counts()
        assert counts.missing == 0
        assert counts.free == model.free
        assert counts.filling == len(model.filling)
        assert counts.quarantined == len(model.quarantined)
        assert counts.cached == sum(block.references == 0 for block in model.blocks.values())
        assert self.blocks.available() == model.free + len(model.evictable())
        assert set(self.blocks.snapshot()[1]) == set(model.blocks)

    def _reserve(self, count: int) -> list[PageId]:
        available = self.model.free + len(self.model.evictable())
        if count > available:
            with pytest.raises(OutOfPages) as caught:
                self.blocks.reserve(count)
            assert caught.value.available == available
            return []
        while self.model.free < count:
            self.model.evict()
        pages = self.blocks.reserve(count)
        self.model.filling.update(pages)
        return pages

    def _seal(self, page: PageId, path: str, exact: bool, checksum: int) -> PageId:
        expected = self.model.seal(page, name(path), ModelBlock(page, parent_of(path), exact, checksum))
        sealed = self.blocks.seal(page, name(path), parent=parent_of(path), exact=exact, checksum=checksum)
        assert sealed == expected
        info = self.blocks.describe(sealed)
        assert info.checksum == self.model.blocks[name(path)].checksum
        assert info.exact == self.model.blocks[name(path)].exact
        return sealed

    def _match(self, path: str, exact: bool) -> list[PageId]:
        expected = []
        for block_hash in chain(path):
            block = self.model.blocks.get(block_hash)
            if block is None or (exact and not block.exact):
                break
            block.references += 1
            expected.append(block.page)
        held = [block_hash in self.model.blocks for block_hash in chain(path)]
        assert self.blocks.peek(chain(path)) == [*held, False].index(False)
        assert self.blocks.match(chain(path), exact=exact) == expected
        return expected

    def _references(self, page: PageId) -> int:
        if page in self.model.orphans:
            return self.model.orphans[page]
        return next((b.references for b in self.model.blocks.values() if b.page == page), 0)


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
