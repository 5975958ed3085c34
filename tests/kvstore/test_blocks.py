"""``BlockManager``: each rule by name. test_block_machine.py holds all of them against a dictionary model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from epdserve.kvstore.blocks import BlockManager
from epdserve.kvstore.errors import ConservationError, OutOfPages, WrongPhase
from epdserve.kvstore.phases import NEXT, Event, Phase
from epdserve.kvstore.types import Conservation, PageId
from support.block_paths import chain, name, parent_of
from support.manual_clock import ManualClock


def fill(
    blocks: BlockManager, path: str, *, exact: bool = True, have: int = 0, checksum: int = 7
) -> list[PageId]:
    """Seal the blocks of ``path`` after the first ``have``; returns the pages, referenced."""
    pages = []
    for end in range(have + 1, len(path) + 1):
        (page,) = blocks.reserve(1)
        part = path[:end]
        pages.append(blocks.seal(page, name(part), parent=parent_of(part), exact=exact, checksum=checksum))
    return pages


def cache(blocks: BlockManager, path: str, *, exact: bool = True) -> list[PageId]:
    pages = fill(blocks, path, exact=exact)
    blocks.release(pages)
    return pages


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def blocks(clock: ManualClock) -> BlockManager:
    return BlockManager(4, clock)


# -- reserve, abort, quarantine


def test_reserved_pages_are_distinct_and_filling(blocks: BlockManager) -> None:
    assert sorted(blocks.reserve(3)) == [0, 1, 2]
    assert blocks.counts() == Conservation(free=1, filling=3, sealed=0, cached=0, quarantined=0, total=4)
    assert blocks.reserve(0) == []


def test_a_reservation_that_cannot_be_met_changes_nothing(blocks: BlockManager) -> None:
    cache(blocks, "ab")
    blocks.reserve(1)
    before = blocks.counts()
    with pytest.raises(OutOfPages) as caught:
        blocks.reserve(4)
    assert (caught.value.asked, caught.value.available) == (4, 3)
    assert blocks.counts() == before
    assert blocks.peek(chain("ab")) == 2
    with pytest.raises(ValueError, match="count"):
        blocks.reserve(-1)


def test_the_page_freed_longest_ago_is_handed_out_first(blocks: BlockManager) -> None:
    pages = blocks.reserve(4)
    blocks.abort([pages[2]])
    blocks.abort([pages[0]])
    assert blocks.reserve(2) == [pages[2], pages[0]]


def test_a_quarantined_page_is_handed_out_only_after_its_transfer(blocks: BlockManager) -> None:
    pages = blocks.reserve(4)
    blocks.quarantine(pages[:2])
    blocks.abort(pages[2:])
    assert set(blocks.reserve(2)) == set(pages[2:])
    with pytest.raises(OutOfPages):
        blocks.reserve(1)
    blocks.transfer_over(pages[:2])
    assert set(blocks.reserve(2)) == set(pages[:2])


# -- seal, match, release


def test_a_sealed_block_is_found_with_a_reference_of_its_own(blocks: BlockManager) -> None:
    pages = fill(blocks, "ab")
    assert blocks.match(chain("ab"), exact=True) == pages
    blocks.release(pages)
    assert blocks.counts().sealed == 2
    blocks.release(pages)
    assert blocks.counts().cached == 2


def test_match_takes_the_longest_prefix_and_nothing_beyond_a_hole(blocks: BlockManager) -> None:
    pages = cache(blocks, "ab")
    assert blocks.match(chain("abx"), exact=False) == pages
    assert blocks.match(chain("xab"), exact=False) == []
    assert blocks.match([name("ab")], exact=False) == pages[1:]


def test_peek_counts_without_referencing(blocks: BlockManager) -> None:
    cache(blocks, "ab")
    assert blocks.peek(chain("abc")) == 2
    assert blocks.peek(chain("ab")) == 2
    assert blocks.peek([]) == 0
    assert blocks.counts().cached == 2


def test_exact_requests_stop_at_the_first_tainted_block(blocks: BlockManager) -> None:
    fill(blocks, "a", exact=True)
    fill(blocks, "ab", have=1, exact=False)
    fill(blocks, "abc", have=2, exact=True)
    assert len(blocks.match(chain("abc"), exact=True)) == 1
    assert len(blocks.match(chain("abc"), exact=False)) == 3


def test_the_first_page_sealed_under_a_hash_wins(blocks: BlockManager) -> None:
    (first,) = fill(blocks, "a", checksum=1)
    (second,) = blocks.reserve(1)
    assert blocks.seal(second, name("a"), parent=None, exact=True, checksum=2) == first
    assert blocks.describe(first).checksum == 1
    assert blocks.counts() == Conservation(free=3, filling=0, sealed=1, cached=0, quarantined=0, total=4)
    blocks.release([first, first])
    assert blocks.counts().cached == 1


def test_a_duplicate_revives_a_cached_page(blocks: BlockManager) -> None:
    (first,) = cache(blocks, "a")
    assert fill(blocks, "a") == [first]
    assert blocks.counts().sealed == 1


def test_a_tainted_page_does_not_replace_an_exact_one(blocks: BlockManager) -> None:
    (first,) = fill(blocks, "a", exact=True)
    assert fill(blocks, "a", exact=False) == [first]
    assert blocks.describe(first).exact


def test_an_exact_page_replaces_a_tainted_one_that_is_cached(blocks: BlockManager) -> None:
    cache(blocks, "ab", exact=False)
    (better,) = fill(blocks, "a", exact=True)
    assert blocks.match(chain("ab"), exact=True) == [better]
    assert blocks.match(chain("ab"), exact=False)[0] == better
    assert blocks.counts() == Conservation(free=2, filling=0, sealed=2, cached=0, quarantined=0, total=4)
    blocks.check()


def test_a_replaced_page_stays_with_its_readers_until_they_release_it(blocks: BlockManager) -> None:
    (tainted,) = fill(blocks, "a", exact=False)
    (better,) = fill(blocks, "a", exact=True)
    assert better != tainted
    assert not blocks.describe(tainted).exact
    assert blocks.match([name("a")], exact=False) == [better]
    blocks.release([tainted])
    assert blocks.counts() == Conservation(free=3, filling=0, sealed=1, cached=0, quarantined=0, total=4)


def test_describe_names_owner_count_hash_and_checksum(blocks: BlockManager) -> None:
    (page,) = fill(blocks, "a", checksum=42)
    info = blocks.describe(page)
    assert (info.page, info.block_hash, info.checksum, info.exact) == (page, name("a"), 42, True)
    blocks.release([page])
    blocks.reserve(4)
    blocks.abort([page])
    blocks.reserve(1)
    blocks.seal(page, name("b"), parent=None, exact=True, checksum=1)
    assert blocks.describe(page).generation == info.generation + 2


def test_pinned_pages_outlive_the_request_that_made_them(blocks: BlockManager) -> None:
    pages = fill(blocks, "ab")
    blocks.pin(pages)
    blocks.release(pages)
    with pytest.raises(OutOfPages):
        blocks.reserve(3)
    blocks.release(pages)
    assert len(blocks.reserve(4)) == 4


# -- eviction


def test_leaves_go_before_their_parents_whatever_their_age(blocks: BlockManager) -> None:
    pages = fill(blocks, "abc")
    blocks.release(pages[::-1])  # the leaf was used first, the root last; then the other way round
    blocks.reserve(2)
    assert blocks.peek(chain("abc")) == 2
    blocks.reserve(1)
    assert blocks.peek(chain("abc")) == 1


def test_of_two_leaves_the_one_used_longest_ago_goes(blocks: BlockManager) -> None:
    cache(blocks, "a")
    cache(blocks, "b")
    blocks.release(blocks.match([name("a")], exact=False))
    blocks.reserve(3)
    assert blocks.peek([name("a")]) == 1
    assert blocks.peek([name("b")]) == 0


def test_a_parent_that_became_a_leaf_goes_by_its_own_last_use(blocks: BlockManager) -> None:
    cache(blocks, "ab")
    cache(blocks, "x")
    blocks.release(blocks.match([name("a")], exact=False))  # newer than b and x
    blocks.reserve(2)  # one free page, then b
    assert blocks.peek([name("a")]) == blocks.peek([name("x")]) == 1
    blocks.reserve(1)
    assert blocks.peek([name("a")]) == 1
    assert blocks.peek([name("x")]) == 0


def test_a_parent_is_not_evicted_while_its_child_is_referenced(blocks: BlockManager) -> None:
    pages = fill(blocks, "abc")
    blocks.release(pages[:2])
    assert blocks.available() == 1
    with pytest.raises(OutOfPages):
        blocks.reserve(2)
    blocks.release(pages[2:])
    assert blocks.available() == 4


def test_a_child_sealed_before_its_parent_keeps_it_too(blocks: BlockManager) -> None:
    (child,) = fill(blocks, "ab", have=1)
    (root,) = fill(blocks, "a")
    blocks.release([root])
    assert blocks.available() == 2
    blocks.release([child])
    blocks.reserve(3)
    assert blocks.peek(chain("ab")) == 1


def test_a_sealed_page_is_never_evicted(blocks: BlockManager) -> None:
    fill(blocks, "ab")
    with pytest.raises(OutOfPages):
        blocks.reserve(3)


# -- events


def test_events_tell_what_came_and_went(blocks: BlockManager) -> None:
    cache(blocks, "ab")
    first = blocks.drain_events()
    assert (first.first_seq, set(first.added), first.removed) == (0, set(chain("ab")), ())
    blocks.reserve(3)
    second = blocks.drain_events()
    assert (second.first_seq, second.added, second.removed) == (2, (), (name("ab"),))
    assert blocks.snapshot() == (3, (name("a"),))


def test_a_replaced_block_is_no_event(blocks: BlockManager) -> None:
    cache(blocks, "a", exact=False)
    blocks.drain_events()
    fill(blocks, "a", exact=True)
    assert blocks.drain_events().next_seq == 1


# -- misuse


def test_every_step_outside_the_table_is_refused_and_changes_nothing(blocks: BlockManager) -> None:
    sealed, filling, quarantined = fill(blocks, "a")[0], *blocks.reserve(2)
    blocks.quarantine([quarantined])
    pages = {
        Phase.FREE: PageId(3),
        Phase.FILLING: filling,
        Phase.SEALED: sealed,
        Phase.QUARANTINED: quarantined,
    }
    calls = {
        Event.ABORT: lambda page: blocks.abort([page]),
        Event.QUARANTINE: lambda page: blocks.quarantine([page]),
        Event.TRANSFER_OVER: lambda page: blocks.transfer_over([page]),
        Event.PIN: lambda page: blocks.pin([page]),
        Event.RELEASE: lambda page: blocks.release([page]),
        Event.DESCRIBE: blocks.describe,
        Event.SEAL: lambda page: blocks.seal(page, name("z"), parent=None, exact=True, checksum=0),
    }
    before = blocks.counts()
    for event, call in calls.items():
        for phase, page in pages.items():
            if (phase, event) not in NEXT:
                with pytest.raises(WrongPhase):
                    call(page)
        for page in (PageId(-1), PageId(4)):
            with pytest.raises(WrongPhase):
                call(page)
    assert blocks.counts() == before
    blocks.check()


def test_a_list_with_one_wrong_page_changes_none(blocks: BlockManager) -> None:
    sealed, filling = fill(blocks, "a")[0], blocks.reserve(1)[0]
    for call in (blocks.release, blocks.pin):
        with pytest.raises(WrongPhase):
            call([sealed, filling])
    with pytest.raises(WrongPhase):
        blocks.abort([filling, sealed])
    with pytest.raises(WrongPhase):
        blocks.release([sealed, sealed])
    with pytest.raises(WrongPhase):
        blocks.abort([filling, filling])
    assert blocks.counts() == Conservation(free=2, filling=1, sealed=1, cached=0, quarantined=0, total=4)


def test_check_notices_a_page_that_got_lost(blocks: BlockManager) -> None:
    blocks.check()
    blocks._allocator.take()
    with pytest.raises(ConservationError, match="free"):
        blocks.check()


@pytest.mark.parametrize("pages", [0, -1])
def test_a_device_without_pages_is_refused(pages: int) -> None:
    with pytest.raises(ValueError, match="num_pages"):
        BlockManager(pages)


# -- many threads


def test_threads_leave_nothing_behind() -> None:
    blocks = BlockManager(24)

    def work(seed: int) -> None:
        for turn in range(150):
            path = "abcd"[(seed + turn) % 4] + "xyz"[turn % 3] + "q"
            pages = blocks.match(chain(path), exact=False)
            pages += fill(blocks, path, have=len(pages))
            blocks.pin(pages)
            blocks.release(pages + pages)
            spare = blocks.reserve(2)
            blocks.quarantine(spare[:1])
            blocks.transfer_over(spare[:1])
            blocks.abort(spare[1:])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    blocks.check()
    counts = blocks.counts()
    assert counts.filling == counts.sealed == counts.quarantined == 0
