from __future__ import annotations

import threading
from typing import TypeVar

import numpy as np
import pytest
from epdserve.kvstore.block_header import HEADER_BYTES, BlockHeader
from epdserve.kvstore.errors import CorruptBlock
from epdserve.kvstore.host_cache import HostCache
from epdserve.kvstore.host_metrics import HostCacheMetrics
from epdserve.kvstore.host_pins import PinnedBlock
from epdserve.kvstore.slots import Slot
from epdserve.kvstore.staging import Bytes, StagingPool
from epdserve.kvstore.types import BlockHash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from prometheus_client import CollectorRegistry
from support.block_paths import chain, name, parent_of
from support.host_cache_model import HostCacheModel, ModelEntry
from support.kv_blocks import toy_checksum
from support.manual_clock import ManualClock

T = TypeVar("T")

PAGE = 4096
PAYLOAD = 4000


def block(path: str, *, exact: bool = True) -> tuple[BlockHeader, Bytes]:
    """A valid block whose bytes follow from its name and its exactness."""
    seed = int.from_bytes(name(path), "little") + exact
    page = np.random.default_rng(seed).integers(0, 256, PAGE, dtype=np.uint8)
    header = BlockHeader(name(path), toy_checksum(page[:PAYLOAD].data, name(path)), PAYLOAD, exact)
    page[PAYLOAD : PAYLOAD + HEADER_BYTES] = np.frombuffer(header.encode(), np.uint8)
    return header, page


def put(cache: HostCache, path: str, *, exact: bool = True) -> bool:
    header, page = block(path, exact=exact)
    return cache.put(page, header, parent=parent_of(path))


def pool(count: int) -> StagingPool:
    return StagingPool("host_cache", slot_bytes=PAGE, count=count)


class Stage:
    """A cache of ``slots`` blocks with its clock, pool and metrics."""

    def __init__(self, slots: int = 3) -> None:
        self.clock, self.pool, self.registry = ManualClock(), pool(slots), CollectorRegistry()
        metrics = HostCacheMetrics(self.registry)
        self.cache = HostCache(self.pool, clock=self.clock, metrics=metrics)
        metrics.watch(held_bytes=self.cache.held_bytes, pinned=self.cache.pinned)

    def value(self, noun: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"epdserve_kvstore_host_cache_{noun}", labels)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_what_was_put_is_got_and_a_stranger_is_a_miss(stage: Stage) -> None:
    assert put(stage.cache, "a")
    with _held(stage.cache.get(name("a"), checksum=toy_checksum)) as found:
        header, page = block("a")
        assert found.header == header
        assert np.array_equal(found.page, page)
        with pytest.raises(ValueError, match="read-only"):
            found.page[0] = 1
    assert stage.cache.get(name("b")) is None
    assert (stage.value("blocks_total", result="hit"), stage.value("blocks_total", result="miss")) == (1, 1)
    assert stage.value("bytes") == PAGE == stage.cache.held_bytes()


def test_a_chain_is_copied_as_far_as_it_is_held(stage: Stage) -> None:
    put(stage.cache, "a"), put(stage.cache, "ab")
    pages = [np.zeros(PAGE, np.uint8) for _ in range(3)]
    headers = stage.cache.copy_prefix(chain("abc"), pages, checksum=toy_checksum)
    assert headers == [block("a")[0], block("ab")[0]]
    assert np.array_equal(pages[1], block("ab")[1])
    assert not pages[2].any()
    assert stage.cache.peek(chain("abc")) == 2
    assert stage.cache.peek(chain("ab")) == 2
    assert stage.cache.pinned() == 0


def test_a_chain_is_put_as_far_as_there_is_room(stage: Stage) -> None:
    put(stage.cache, "a")
    headers, pages = zip(*(block(path) for path in ("a", "ab", "abc", "abcd")), strict=True)
    reader = _held(stage.cache.get(name("a")))
    assert stage.cache.put_chain(pages, headers, parent=None, checksum=toy_checksum) == 3
    assert stage.value("puts_total", result="refused") == 1
    assert stage.value("puts_total", result="duplicate") == 1
    assert stage.cache.put_chain([], [], parent=None) == 0
    reader.release()
    put(stage.cache, "z")  # parents were understood: the last of the chain goes
    assert set(stage.cache.snapshot()[1]) == {name("a"), name("ab"), name("z")}
    stage.cache.check()


def test_long_chains_are_put_in_portions() -> None:
    stage = Stage(slots=200)
    names = [bytes([65 + i // 26, 65 + i % 26]).decode() for i in range(150)]
    headers, pages = zip(*(block(path) for path in names), strict=True)
    assert stage.cache.put_chain(pages, headers, parent=None) == 150
    assert stage.cache.peek([header.block_hash for header in headers]) == 150
    stage.cache.check()


def test_a_corrupt_block_ends_a_chain_and_keeps_what_came_before(stage: Stage) -> None:
    headers, pages = zip(*(block(path) for path in ("a", "ab", "abc")), strict=True)
    pages[1][7] ^= 1
    with pytest.raises(CorruptBlock):
        stage.cache.put_chain(pages, headers, parent=None, checksum=toy_checksum)
    assert stage.cache.snapshot()[1] == (name("a"),)
    assert stage.pool.counts().held == 1
    with pytest.raises(ValueError, match="as many"):
        stage.cache.put_chain(pages, headers[:2], parent=None)
    stage.cache.check()


def test_leaves_go_first_then_the_one_unused_for_longest(stage: Stage) -> None:
    for path in ("a", "ab", "z"):
        put(stage.cache, path)
        stage.clock.advance(1.0)
    put(stage.cache, "y")  # "a" is the oldest, but "ab" needs it
    assert set(stage.cache.snapshot()[1]) == {name("a"), name("z"), name("y")}
    put(stage.cache, "x")
    assert set(stage.cache.snapshot()[1]) == {name("z"), name("y"), name("x")}
    assert stage.value("evictions_total", reason="space") == 2
    assert stage.value("evicted_idle_seconds_sum") == 5.0


def test_a_pinned_block_stays_and_a_full_cache_refuses(stage: Stage) -> None:
    pinned = []
    for path in "abc":
        put(stage.cache, path)
        pinned.append(_held(stage.cache.get(name(path))))
    assert not put(stage.cache, "d")
    assert stage.value("puts_total", result="refused") == 1
    assert stage.value("pinned_blocks") == 3
    pinned[1].release()
    assert put(stage.cache, "d")
    assert set(stage.cache.snapshot()[1]) == {name("a"), name("c"), name("d")}
    with pytest.raises(ValueError, match="released"):
        pinned[1].release()


def test_a_block_is_copied_once(stage: Stage) -> None:
    put(stage.cache, "a")
    header, page = block("a")
    assert stage.cache.put(np.zeros_like(page), header, parent=None)  # not even looked at
    with _held(stage.cache.get(name("a"), checksum=toy_checksum)) as found:
        assert np.array_equal(found.page, page)
    assert stage.value("puts_total", result="new") == stage.value("puts_total", result="duplicate") == 1


def test_only_an_exact_block_replaces_a_tainted_one_whose_readers_keep_it(stage: Stage) -> None:
    put(stage.cache, "a", exact=False)
    assert stage.cache.get(name("a"), exact=True) is None
    old = _held(stage.cache.get(name("a")))
    put(stage.cache, "a", exact=True)
    put(stage.cache, "a", exact=False)
    with _held(stage.cache.get(name("a"), exact=True)) as new:
        assert np.array_equal(new.page, block("a")[1])
        assert np.array_equal(old.page, block("a", exact=False)[1])
        assert stage.pool.counts().held == 2
    old.release()
    assert stage.pool.counts().held == 1
    assert stage.value("evictions_total", reason="replaced_by_exact") == 1
    stage.cache.check()


@pytest.mark.parametrize("offset", [0, PAYLOAD - 1, PAYLOAD, PAYLOAD + 10, PAYLOAD + 30, PAYLOAD + 63])
def test_other_bytes_than_promised_are_not_kept(stage: Stage, offset: int) -> None:
    header, page = block("a")
    page[offset] ^= 4
    with pytest.raises(CorruptBlock):
        stage.cache.put(page, header, parent=None, checksum=toy_checksum)
    assert len(stage.cache) == stage.pool.counts().held == 0
    assert stage.value("puts_total", result="corrupt") == 1


def test_a_block_that_rots_is_a_miss_and_goes_even_while_it_is_read(stage: Stage) -> None:
    for path in ("a", "ab", "abc"):
        put(stage.cache, path)
    reader = _held(stage.cache.get(name("ab")))
    stage.pool.bytes_of(reader.slot)[5] ^= 1
    pages = [np.zeros(PAGE, np.uint8) for _ in range(3)]
    assert stage.cache.copy_prefix(chain("abc"), pages, checksum=toy_checksum) == [block("a")[0]]
    assert stage.cache.get(name("ab")) is None
    assert stage.value("evictions_total", reason="corrupt") == 1
    assert stage.cache.pinned() == 1
    reader.release()
    stage.cache.check()
    assert stage.pool.counts().held == 2


def test_deleted_blocks_are_gone_at_once(stage: Stage) -> None:
    for path in ("a", "ab"):
        put(stage.cache, path)
    assert stage.cache.delete([name("a"), name("z")]) == 1
    assert stage.cache.snapshot()[1] == (name("ab"),)
    assert put(stage.cache, "a")
    assert stage.cache.peek(chain("ab")) == 2
    assert stage.value("evictions_total", reason="deleted") == 1


def test_a_slot_is_filled_in_place_or_set_apart(stage: Stage) -> None:
    first, second, third = (_held(stage.cache.reserve()) for _ in range(3))
    assert stage.cache.reserve() is None
    header, page = block("a")
    stage.pool.bytes_of(first)[:] = page
    stage.cache.seal(first, header, parent=None, checksum=toy_checksum)
    stage.cache.abort(second)
    stage.cache.quarantine(third)
    stage.cache.check()
    counts = stage.pool.counts()
    assert (counts.free, counts.held, counts.quarantined) == (1, 1, 1)
    stage.cache.transfer_over(third)
    assert stage.pool.counts().free == 2


def test_a_page_of_another_size_or_a_checksum_that_fails_leaves_nothing_behind(stage: Stage) -> None:
    def broken(payload: memoryview, block_hash: bytes) -> int:
        raise OSError("device lost")

    header, page = block("a")
    with pytest.raises(ValueError, match="4096"):
        stage.cache.put(page[:100], header, parent=None)
    with pytest.raises(OSError, match="lost"):
        stage.cache.put(page, header, parent=None, checksum=broken)
    put(stage.cache, "a")
    with pytest.raises(OSError, match="lost"):
        stage.cache.get(name("a"), checksum=broken)
    assert stage.cache.pinned() == 0
    stage.cache.check()


def test_events_tell_what_is_held(stage: Stage) -> None:
    for path in ("a", "b", "c", "d"):
        put(stage.cache, path)
    events = stage.cache.drain_events()
    assert set(events.added) - set(events.removed) == set(stage.cache.snapshot()[1])


def test_threads_never_see_bytes_of_another_block() -> None:
    stage = Stage(slots=6)
    paths = [letter * length for letter in "abcd" for length in (1, 2, 3)]
    pages = {path: block(path) for path in paths}
    wrong: list[str] = []

    def work(seed: int) -> None:
        dice = np.random.default_rng(seed)
        for _ in range(150):
            path = paths[dice.integers(len(paths))]
            header, page = pages[path]
            stage.cache.put(page, header, parent=parent_of(path))
            for found in stage.cache.match(chain(path)):
                with found:
                    if not np.array_equal(
                        found.page, pages[path[: len(found.header.block_hash.strip(b"."))]][1]
                    ):
                        wrong.append(path)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    stage.cache.check()
    assert stage.cache.pinned() == 0


paths = st.text("ab", min_size=1, max_size=4)


class HostCacheMachine(RuleBasedStateMachine):
    """Against a dictionary: what is held, pinned, and what goes next."""

    filling = Bundle("filling")
    late = Bundle("late")
    reading = Bundle("reading")

    def __init__(self) -> None:
        super().__init__()
        self.slots = pool(5)
        self.cache = HostCache(self.slots, clock=ManualClock())
        self.model = HostCacheModel(5)
        self.reader: set[BlockHash] = set()

    @rule(path=paths, exact=st.booleans(), verified=st.booleans())
    def put(self, path: str, exact: bool, verified: bool) -> None:
        header, page = block(path, exact=exact)
        held = self.model.blocks.get(name(path))
        checksum = toy_checksum if verified else None
        if held is not None and (held.exact or not exact):
            self.model.use(held)
            expected = True
        else:
            expected = self.model.reserve()
            if expected:
                self.model.seal(name(path), parent_of(path), exact)
        assert self.cache.put(page, header, parent=parent_of(path), checksum=checksum) == expected

    @rule(target=filling)
    def reserve(self) -> object:
        expected = self.model.reserve()
        slot = self.cache.reserve()
        assert (slot is not None) == expected
        return multiple() if slot is None else slot

    @rule(slot=consumes(filling), path=paths, exact=st.booleans())
    def seal(self, slot: Slot, path: str, exact: bool) -> None:
        header, page = block(path, exact=exact)
        self.slots.bytes_of(slot)[:] = page
        self.cache.seal(slot, header, parent=parent_of(path))
        self.model.seal(name(path), parent_of(path), exact)

    @rule(slot=consumes(filling))
    def abort(self, slot: Slot) -> None:
        self.cache.abort(slot)
        self.model.filling -= 1

    @rule(target=late, slot=consumes(filling))
    def quarantine(self, slot: Slot) -> Slot:
        self.cache.quarantine(slot)
        self.model.filling -= 1
        self.model.quarantined += 1
        return slot

    @rule(slot=consumes(late))
    def transfer_over(self, slot: Slot) -> None:
        self.cache.transfer_over(slot)
        self.model.quarantined -= 1

    @rule(target=reading, path=paths, exact=st.booleans())
    def match(self, path: str, exact: bool) -> object:
        expected = []
        for block_hash in chain(path):
            entry = self.model.blocks.get(block_hash)
            if entry is None or (exact and not entry.exact):
                break
            entry.pins += 1
            expected.append(entry)
        found = self.cache.match(chain(path), exact=exact)
        assert [pin.header.exact for pin in found] == [entry.exact for entry in expected]
        return multiple(*zip(found, expected, strict=True))

    @rule(read=consumes(reading))
    def release(self, read: tuple[PinnedBlock, ModelEntry]) -> None:
        pin, entry = read
        path = pin.header.block_hash.rstrip(b".").decode()
        assert np.array_equal(pin.page, block(path, exact=entry.exact)[1])
        pin.release()
        self.model.unpin(entry)

    @rule(path=paths)
    def delete(self, path: str) -> None:
        assert self.cache.delete([name(path)]) == self.model.drop(name(path))

    @rule()
    def drain(self) -> None:
        events = self.cache.drain_events()
        self.reader = (self.reader | set(events.added)) - set(events.removed)
        assert self.reader == set(self.model.blocks)

    @invariant()
    def adds_up(self) -> None:
        self.cache.check()
        assert set(self.cache.snapshot()[1]) == set(self.model.blocks)
        assert self.slots.counts().free == self.model.free
        pinned = sum(entry.pins > 0 for entry in self.model.blocks.values()) + len(self.model.leaving)
        assert self.cache.pinned() == pinned


TestHostCacheMachine = HostCacheMachine.TestCase
TestHostCacheMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def _held(value: T | None) -> T:
    assert value is not None
    return value
