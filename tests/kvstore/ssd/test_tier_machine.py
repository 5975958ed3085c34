"""``SsdTier`` against a dictionary: random steps on two small drives; the same answers after each."""

from __future__ import annotations

import tempfile
from pathlib import Path

from epdserve.kvstore.ssd.retention import Admission, Mode, RetentionPolicy
from epdserve.kvstore.types import BlockHash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.broken_disk import BrokenDisk
from support.manual_clock import ManualClock
from support.ssd import OTHER, SLOT, TENANT, make_tier, name, put_of, read, same

paths = st.text("ab", min_size=1, max_size=4)
tenants = st.sampled_from([TENANT, OTHER])
POLICY = RetentionPolicy(
    floor_s=100,
    mode=Mode.FLOOR,
    reserve_ratio=0.15,
    low_free_ratio=0.2,
    high_free_ratio=0.4,
    last_use_step_s=1,
    quota_bytes={OTHER: 6 * SLOT},
)


class TierMachine(RuleBasedStateMachine):
    """The model knows what was stored, in which version, and when it was used last."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.folders = [Path(self._folder.name) / "one", Path(self._folder.name) / "two"]
        self.clock = ManualClock()
        self.disk = BrokenDisk()
        self.stored: dict[BlockHash, tuple[bool, bytes]] = {}  # exact, tenant
        self.queued: dict[BlockHash, tuple[bool, bytes]] = {}
        self.used: dict[BlockHash, float] = {}
        self._open()

    def teardown(self) -> None:
        self.tier.abandon()
        self._folder.cleanup()

    @rule(path=paths, tenant=tenants, exact=st.booleans(), running=st.booleans())
    def put(self, path: str, tenant: bytes, exact: bool, running: bool) -> None:
        block, parent = self._name(path, tenant), self._name(path[:-1], tenant) if len(path) > 1 else None
        result = self.tier.try_put(
            put_of(block, parent=parent, tenant=tenant, exact=exact, version=int(exact), running=running)
        )
        held = block in self.queued or (block in self.stored and (self.stored[block][0] or not exact))
        assert (result is Admission.HELD) == held
        if result is Admission.ACCEPTED:
            self.queued[block] = (exact, tenant)
        elif held and block in self.stored:
            self.used[block] = self.clock.now

    @rule()
    def pump(self) -> None:
        before = list(self.queued)
        taken = self.tier.pump()
        for block in before[:taken]:
            self.stored[block] = self.queued.pop(block)
            self.used[block] = self.clock.now

    @rule(path=paths, tenant=tenants, direct=st.booleans())
    def get(self, path: str, tenant: bytes, direct: bool) -> None:
        chain = [self._name(path[: end + 1], tenant) for end in range(len(path))]
        for block, page in zip(chain, read(self.tier, chain, direct=direct), strict=True):
            assert (page is not None) == (block in self.stored)
            if page is not None:
                exact = self.stored[block][0]
                assert same(page, block, exact=exact, version=int(exact))
                self.used[block] = self.clock.now

    @rule(seconds=st.sampled_from([1, 30, 101]))
    def wait(self, seconds: int) -> None:
        self.clock.advance(float(seconds))

    @rule()
    def sweep(self) -> None:
        count = self.tier.sweep()
        gone = {block for block in self.stored if not self.tier.contains(block)}
        assert len(gone) == count
        reserve = POLICY.reserve_slots(12)
        young = [block for block in gone if self.clock.now - self.used[block] < POLICY.floor_s]
        assert len(young) <= reserve  # only blocks of the reserve have no floor
        for block in gone:
            del self.stored[block]

    @rule(tenant=tenants)
    def delete(self, tenant: bytes) -> None:
        mine = [block for block, (_, whose) in self.stored.items() if whose == tenant]
        assert self.tier.delete_tenant(tenant) == len(mine)
        for block in mine:
            del self.stored[block]
        self.tier.flush()  # lets go of what was dropped on its way
        for block, entry in list(self.queued.items()):
            del self.queued[block]
            if entry[1] != tenant:
                self.stored[block] = entry
                self.used[block] = self.clock.now

    @rule()
    def restart(self) -> None:
        self.tier.close()
        for block, entry in self.queued.items():
            self.stored[block] = entry
            self.used[block] = self.clock.now
        self.queued.clear()
        self._open()

    @rule()
    def crash(self) -> None:
        self.tier.abandon()
        self.queued.clear()
        self._open()
        for block in self.stored:  # coarse last use may be later than the model knows, never earlier
            self.used[block] = 0.0

    @invariant()
    def agrees(self) -> None:
        self.tier.check(deep=True)
        assert {block for block in self.stored if self.tier.contains(block)} == set(self.stored)
        assert self.tier.figures.live_bytes() == len(self.stored) * SLOT
        assert self.tier.figures.slots_missing() == 0
        assert self.tier.figures.queue_blocks() == len(self.queued)
        held = sum(whose == OTHER for _, whose in [*self.stored.values(), *self.queued.values()])
        assert held <= 6 + POLICY.reserve_slots(12)

    def _open(self) -> None:
        self.tier = make_tier(self.folders, slots=6, clock=self.clock, policy=POLICY, disk=self.disk)
        self.tier.open()

    def _name(self, path: str, tenant: bytes) -> BlockHash:
        return name(path + ("-t" if tenant == TENANT else "-o"))


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
