"""Puts, reads, sweeps and deletions at once: exact bytes or a miss, and everything adds up afterwards."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

from epdserve.kvstore.ssd.retention import Admission, Mode, RetentionPolicy
from support.ssd import OTHER, make_tier, name, put_of, read, same

POLICY = RetentionPolicy(
    floor_s=0, mode=Mode.BEST_EFFORT, reserve_ratio=0.0, low_free_ratio=0.3, high_free_ratio=0.45
)
ENOUGH = 60  # accepted blocks: each slot is written several times


def test_readers_and_writers_do_not_disturb_each_other(tmp_path: Path) -> None:
    tier = make_tier([tmp_path / "a", tmp_path / "b"], slots=10, threads=2, policy=POLICY)
    tier.open()
    tier.start()
    accepted, hits, wrong, stop = [0], [0], [0], threading.Event()

    def write() -> None:
        deadline = time.monotonic() + 20
        for number in itertools.count():
            if accepted[0] >= ENOUGH or time.monotonic() > deadline:
                break
            tenant = OTHER if number % 5 == 0 else name("tenant")
            accepted[0] += tier.try_put(put_of(name(number % 40), tenant=tenant)) is Admission.ACCEPTED
        stop.set()

    def look() -> None:
        while not stop.is_set():
            blocks = [name(number) for number in range(0, 40, 3)]
            for block, page in zip(blocks, read(tier, blocks), strict=True):
                hits[0] += page is not None
                wrong[0] += page is not None and not same(page, block)

    def tidy() -> None:
        while not stop.is_set():
            tier.delete_tenant(OTHER)
            tier.sweep()
            tier.check()

    threads = [threading.Thread(target=run) for run in (write, look, look, tidy)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    tier.flush()
    tier.check(deep=True)
    assert accepted[0] >= ENOUGH
    assert hits[0] > 0
    assert wrong[0] == 0
    assert tier.figures.slots("quarantined") == 0  # what was written again under a reader is no corruption
    tier.close()
