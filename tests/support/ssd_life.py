"""A short life of an SSD tier that does everything a tier does, for tests that cut it, kill it or make it fail."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epdserve.kvstore.ssd.disk import Disk
from epdserve.kvstore.ssd.retention import Admission, Mode, RetentionPolicy
from epdserve.kvstore.ssd.tier import SsdTier
from epdserve.kvstore.types import BlockHash
from support.manual_clock import ManualClock
from support.ssd import OTHER, TENANT, make_tier, name, put_of, read

POLICY = RetentionPolicy(
    floor_s=60,
    mode=Mode.FLOOR,
    reserve_ratio=0.0,
    low_free_ratio=0.3,
    high_free_ratio=0.45,
    last_use_step_s=30,
)
SLOTS = 7


@dataclass(slots=True)
class Life:
    """What a run did, as far as it got: block -> version stored, and what may be missing."""

    stored: dict[BlockHash, set[int]] = field(default_factory=dict)  # versions that were ever offered
    durable: set[BlockHash] = field(default_factory=set)
    may_go: set[BlockHash] = field(default_factory=set)
    deleted: set[BlockHash] = field(default_factory=set)

    def put(self, tier: SsdTier, labels: str, version: int = 0, **how: Any) -> None:
        blocks = [name(label) for label in labels]
        for block in blocks:
            self.stored.setdefault(block, set()).add(version)
        if version:
            self.may_go.update(blocks)  # the old one goes, the new one may not get there
        puts = [put_of(block, version=version, exact=version > 0, **how) for block in blocks]
        assert set(tier.put_batch(puts)) == {Admission.ACCEPTED}
        self.durable.update(blocks)
        self.may_go.difference_update(blocks)


def live(life: Life, folders: list[Path], disk: Disk, clock: ManualClock) -> None:
    """Everything the tier does, in one short life on two drives."""
    tier = make_tier(folders, slots=SLOTS, clock=clock, policy=POLICY, disk=disk)
    tier.open()
    for label in "abcd":
        life.put(tier, label, tenant=TENANT, parent=None if label == "a" else name(chr(ord(label) - 1)))
    life.put(tier, "xyz", tenant=OTHER)
    clock.advance(100.0)
    life.put(tier, "x", version=1, tenant=OTHER)
    tier.touch([name("a"), name("b")])
    tier.save_use()
    read(tier, [name("a"), name("y")])
    for label in "ef":
        life.put(tier, label)
    clock.advance(30.0)
    life.put(tier, "g")
    old = {name(label) for label in "cdz"}
    life.may_go |= old
    assert tier.sweep() == 3
    life.durable -= old
    life.put(tier, "hiklmno")  # all at once: slots that were just freed are written again
    theirs = {name(label) for label in "xyz"}
    life.may_go |= theirs
    assert tier.delete_tenant(OTHER) == 2
    life.durable -= theirs
    life.deleted |= theirs
    life.put(tier, "j")
    tier.close()
