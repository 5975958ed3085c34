"""The tier as its user sees it: what goes in comes out exact, from every directory, over restarts."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from epdserve.kvstore.errors import CorruptBlock
from epdserve.kvstore.ssd.directory import FORMAT_VERSION
from epdserve.kvstore.ssd.errors import DirectoryOwned, NoUsableDirectory, WrongFormat
from epdserve.kvstore.ssd.retention import Admission, Mode, RetentionPolicy
from support.manual_clock import ManualClock
from support.ssd import OTHER, OTHER_ROOT, SLOT, TENANT, make_tier, name, put_of, read, same

BLOCKS = [name(number) for number in range(6)]


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "bounced"])
@pytest.mark.parametrize("threads", [0, 2], ids=lambda n: f"threads{n}")
def test_blocks_come_out_as_they_went_in(tmp_path: Path, threads: int, direct: bool) -> None:
    tier = make_tier([tmp_path / "a", tmp_path / "b"], threads=threads)
    tier.open()
    assert tier.put_batch([put_of(block) for block in BLOCKS]) == [Admission.ACCEPTED] * 6
    pages = read(tier, [*BLOCKS, name("none")], direct=direct)
    assert [same(page, block) for page, block in zip(pages, BLOCKS, strict=False)] == [True] * 6
    assert pages[6] is None
    tier.check(deep=True)
    tier.close()


def test_a_restart_finds_everything_with_and_without_the_table(tmp_path: Path) -> None:
    tier = make_tier([tmp_path])
    assert tier.open().blocks == 0
    tier.put_batch([put_of(block, exact=False) for block in BLOCKS])
    tier.close()
    for lose in (False, True):
        if lose:
            (tmp_path / "names.tbl").unlink()
        tier = make_tier([tmp_path])
        opened = tier.open()
        assert opened.blocks == 6
        assert opened.scanned == ((str(tmp_path),) if lose else ())
        pages = read(tier, BLOCKS)
        assert all(same(page, block, exact=False) for page, block in zip(pages, BLOCKS, strict=True))
        tier.check(deep=True)
        tier.close()


def test_a_block_is_found_once_it_is_stored_and_not_before(tmp_path: Path) -> None:
    tier = make_tier([tmp_path])
    tier.open()
    assert tier.try_put(put_of(BLOCKS[0])) is Admission.ACCEPTED
    assert not tier.contains(BLOCKS[0])
    assert read(tier, BLOCKS[:1]) == [None]
    assert tier.try_put(put_of(BLOCKS[0])) is Admission.HELD
    assert tier.pump() == 1
    assert tier.contains(BLOCKS[0])
    assert tier.try_put(put_of(BLOCKS[0])) is Admission.HELD
    tier.close()


def test_a_full_queue_refuses_at_once(tmp_path: Path) -> None:
    tier = make_tier([tmp_path], settings={"write_behind_blocks": 2})
    tier.open()
    results = [tier.try_put(put_of(block)) for block in BLOCKS[:3]]
    assert results == [Admission.ACCEPTED, Admission.ACCEPTED, Admission.QUEUE_FULL]
    tier.pump()
    assert tier.try_put(put_of(BLOCKS[2])) is Admission.ACCEPTED
    tier.close()


def test_a_thread_of_its_own_stores_what_was_offered(tmp_path: Path) -> None:
    tier = make_tier([tmp_path], threads=1)
    tier.open()
    tier.start()
    for block in BLOCKS:
        assert tier.try_put(put_of(block)) is Admission.ACCEPTED
    tier.close()
    again = make_tier([tmp_path])
    assert again.open().blocks == 6
    again.close()


def test_an_exact_block_takes_the_place_of_a_tainted_one(tmp_path: Path) -> None:
    tier = make_tier([tmp_path / "a", tmp_path / "b"], slots=2)
    tier.open()
    block = BLOCKS[0]
    tier.put_batch([put_of(block, exact=False), put_of(BLOCKS[1])])
    assert tier.longest_prefix(BLOCKS[:2]) == 2
    assert tier.longest_prefix(BLOCKS[:2], exact=True) == 0
    assert tier.put_batch([put_of(block, exact=True, version=1)]) == [Admission.ACCEPTED]
    assert tier.put_batch([put_of(block, exact=False)]) == [Admission.HELD]
    assert same(read(tier, [block])[0], block, exact=True, version=1)
    assert tier.longest_prefix([*BLOCKS[:2], name("none")], exact=True) == 2
    assert tier.figures.slots("live") == 2
    tier.check(deep=True)
    tier.abandon()
    (tmp_path / "a" / "names.tbl").unlink()
    (tmp_path / "b" / "names.tbl").unlink()
    again = make_tier([tmp_path / "a", tmp_path / "b"], slots=2)
    assert again.open().blocks == 2
    assert same(read(again, [block])[0], block, exact=True, version=1)
    again.check(deep=True)
    again.close()


def test_a_second_owner_is_refused(tmp_path: Path) -> None:
    tier = make_tier([tmp_path])
    tier.open()
    with pytest.raises(DirectoryOwned):
        make_tier([tmp_path]).open()
    tier.close()
    again = make_tier([tmp_path])
    again.open()
    again.close()


def test_a_directory_of_another_layout_is_refused(tmp_path: Path) -> None:
    tier = make_tier([tmp_path], slots=8)
    tier.open()
    tier.close()
    with pytest.raises(WrongFormat):
        make_tier([tmp_path], slots=9).open()
    (tmp_path / "format.json").write_bytes(b"{")
    with pytest.raises(WrongFormat):
        make_tier([tmp_path], slots=8).open()


def test_a_directory_of_another_version_is_refused_and_kept_as_it_is(tmp_path: Path) -> None:
    tier = make_tier([tmp_path])
    tier.open()
    tier.put_batch([put_of(block) for block in BLOCKS])
    tier.close()
    written = tmp_path / "format.json"
    ours = written.read_bytes()
    written.write_bytes(json.dumps({**json.loads(ours), "version": FORMAT_VERSION + 1}).encode())
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(WrongFormat, match=f"'version': {FORMAT_VERSION + 1}"):
        make_tier([tmp_path]).open()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    written.write_bytes(ours)  # rolled back
    again = make_tier([tmp_path])
    again.open()
    assert all(same(page, block) for page, block in zip(read(again, BLOCKS), BLOCKS, strict=True))
    again.close()


def test_one_unusable_directory_leaves_the_others_to_serve(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"a file, no folder")
    tier = make_tier([tmp_path / "bad", tmp_path / "good"])
    assert list(tier.open().failed) == [str(tmp_path / "bad")]
    tier.put_batch([put_of(block) for block in BLOCKS])
    assert all(same(page, block) for page, block in zip(read(tier, BLOCKS), BLOCKS, strict=True))
    assert (tier.figures.directories("serving"), tier.figures.directories("failed")) == (1, 1)
    tier.close()
    with pytest.raises(NoUsableDirectory):
        make_tier([tmp_path / "bad"]).open()


def test_deletion_takes_a_tenant_a_model_and_their_traces(tmp_path: Path) -> None:
    clock = ManualClock()
    policy = RetentionPolicy(floor_s=0, reserve_ratio=0, low_free_ratio=0.4, high_free_ratio=0.4)
    tier = make_tier([tmp_path], slots=6, clock=clock, policy=policy)
    tier.open()
    tier.put_batch([put_of(name("first"), tenant=OTHER)])
    clock.advance(10.0)
    tier.put_batch([put_of(block) for block in BLOCKS[:2]] + [put_of(BLOCKS[2], tenant=OTHER)])
    tier.put_batch([put_of(BLOCKS[3], root=OTHER_ROOT)])
    assert tier.sweep() == 2
    assert not tier.contains(name("first"))  # evicted; its bytes are still there
    tier.try_put(put_of(BLOCKS[4], tenant=OTHER))
    assert tier.delete_tenant(OTHER) == 1
    assert tier.pump() == 1
    assert not tier.contains(BLOCKS[4])
    assert tier.delete_root(OTHER_ROOT) == 1
    tier.check(deep=True)
    tier.abandon()
    (tmp_path / "names.tbl").unlink()
    again = make_tier([tmp_path], slots=6)
    again.open()
    assert [again.contains(block) for block in [name("first"), *BLOCKS[:5]]].count(True) == 2
    assert not any(again.contains(block) for block in (name("first"), *BLOCKS[2:5]))
    again.close()


def test_a_page_that_is_no_block_is_not_taken(tmp_path: Path) -> None:
    tier = make_tier([tmp_path])
    tier.open()
    put = put_of(BLOCKS[0])
    put.page[3800] ^= 1
    with pytest.raises(CorruptBlock):
        tier.try_put(put)
    tier.check()
    tier.close()


def test_pages_that_are_too_small_or_too_few_are_the_callers_bug(tmp_path: Path) -> None:
    tier = make_tier([tmp_path])
    tier.open()
    with pytest.raises(ValueError, match="pages"):
        tier.get_batch(BLOCKS[:1], [np.zeros(SLOT // 2, np.uint8)])
    with pytest.raises(ValueError, match="pages"):
        tier.get_batch(BLOCKS[:2], [np.zeros(SLOT, np.uint8)])
    tier.close()


def test_other_tenants_and_roots_have_other_names_and_never_hit(tmp_path: Path) -> None:
    from epdserve.kvstore.hashing import cache_root, prefix_hash_chain

    def chain(
        weights: bytes,
        form: str,
        tenant: bytes,
        layout: bytes = b"layout",
        backend: str = "cpu",
        steady: bool = False,
    ) -> list:
        root = cache_root(weights, layout, form, backend, steady)
        return prefix_hash_chain(range(8), block_tokens=4, root=root, tenant_key=tenant)

    tier = make_tier([tmp_path])
    tier.open()
    own = chain(b"w", "packed", b"key")
    tier.put_batch([put_of(block) for block in own])
    for _ in range(2):
        assert tier.longest_prefix(own) == 2
        for other in (
            chain(b"v", "packed", b"key"),
            chain(b"w", "float32", b"key"),
            chain(b"w", "packed", b"yek"),
            chain(b"w", "packed", b"key", layout=b"another"),
            chain(b"w", "packed", b"key", backend="gpu"),
            chain(b"w", "packed", b"key", steady=True),
        ):
            assert read(tier, other) == [None, None]
        tier.close()
        tier = make_tier([tmp_path])
        tier.open()
    tier.close()


def test_best_effort_makes_room_and_counts_what_was_too_young(tmp_path: Path) -> None:
    policy = RetentionPolicy(mode=Mode.BEST_EFFORT, reserve_ratio=0, low_free_ratio=0.1, high_free_ratio=0.3)
    tier = make_tier([tmp_path], slots=4, policy=policy)
    tier.open()
    assert Admission.ACCEPTED in tier.put_batch([put_of(block) for block in BLOCKS])[4:]
    tier.check(deep=True)
    assert TENANT in tier._core.inventory.tenant_slots
    tier.close()


def test_events_tell_what_is_stored_and_what_has_gone(tmp_path: Path) -> None:
    tier = make_tier([tmp_path / "a", tmp_path / "b"])
    tier.open()
    tier.put_batch([put_of(block, exact=False) for block in BLOCKS])
    first = tier.drain_events()
    assert (first.first_seq, set(first.added), first.removed) == (0, set(BLOCKS), ())
    tier.put_batch([put_of(BLOCKS[0], exact=True)])  # replaces: it is stored all the same
    tier.delete_tenant(OTHER)
    assert tier.drain_events().removed == ()
    tier.delete_tenant(TENANT)
    events = tier.drain_events()
    assert (events.added, set(events.removed)) == ((), set(BLOCKS))
    tier.put_batch([put_of(BLOCKS[0])])
    tier.close()
    tier = make_tier([tmp_path / "a", tmp_path / "b"])
    tier.open()  # what recovery finds is told by a snapshot alone
    assert tier.snapshot() == (tier.drain_events().first_seq, (BLOCKS[0],))
    assert tier.stored(BLOCKS[:2]) == [True, False]
    tier.close()


def test_chains_lie_together_lap_after_lap(tmp_path: Path) -> None:
    policy = RetentionPolicy(floor_s=0, reserve_ratio=0.0, low_free_ratio=0.3, high_free_ratio=0.45)
    tier = make_tier(
        [tmp_path], slots=64, policy=policy, settings={"slots_per_file": 64, "write_behind_blocks": 16}
    )
    tier.open()
    slots = tier._core.inventory.directories[0].slots
    for lap in range(16):  # four times around the disk, a quarter of it each time
        chain = [name(f"{lap} {number}") for number in range(16)]
        tier.put_batch([put_of(block, parent=before) for before, block in pairwise([None, *chain])])
        places = [tier._core.inventory.find(block) for block in chain]
        found = sorted(place.slot for place in places if place is not None)
        assert len(found) == 16
        assert len(slots._runs(found, 0, 64)) <= 4
        tier.sweep()
    tier.check(deep=True)
    tier.close()
