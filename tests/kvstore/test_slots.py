import pytest
from epdserve.kvstore.errors import SlotNotHeld
from epdserve.kvstore.slots import Slot, SlotCounts, SlotPool
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule


def held(pool: SlotPool) -> Slot:
    slot = pool.acquire()
    assert slot is not None
    return slot


def test_an_empty_pool_gives_none() -> None:
    pool = SlotPool(2)
    first, second = held(pool), held(pool)
    assert {first.index, second.index} == {0, 1}
    assert pool.acquire() is None


def test_the_slot_freed_longest_ago_comes_first() -> None:
    pool = SlotPool(3)
    first = held(pool)
    pool.release(first)
    assert [held(pool).index for _ in range(3)] == [1, 2, 0]


def test_a_later_owner_is_safe_from_the_earlier_one() -> None:
    pool = SlotPool(1)
    old = held(pool)
    pool.release(old)
    new = held(pool)
    assert new.index == old.index
    assert new.generation > old.generation
    for give_back in (pool.release, pool.quarantine, pool.transfer_over):
        with pytest.raises(SlotNotHeld):
            give_back(old)
    assert pool.counts() == SlotCounts(free=0, held=1, quarantined=0, total=1)


def test_a_quarantined_slot_waits_for_its_transfer() -> None:
    pool = SlotPool(1)
    slot = held(pool)
    pool.quarantine(slot)
    assert pool.acquire() is None
    with pytest.raises(SlotNotHeld):
        pool.release(slot)
    pool.transfer_over(slot)
    assert held(pool).index == slot.index


def test_giving_back_twice_or_something_unknown_is_refused() -> None:
    pool = SlotPool(1)
    slot = held(pool)
    pool.release(slot)
    for wrong in (slot, Slot(7, 1), Slot(-1, 1)):
        with pytest.raises(SlotNotHeld):
            pool.release(wrong)
    pool.check()


def test_a_pool_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="count"):
        SlotPool(0)


class SlotMachine(RuleBasedStateMachine):
    """Against two sets: what is held and what is quarantined."""

    slots = Bundle("slots")
    late = Bundle("late")

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(4)
        self.held: set[Slot] = set()
        self.quarantined: set[Slot] = set()

    @rule(target=slots, data=st.data())
    def acquire(self, data: st.DataObject) -> object:
        slot = self.pool.acquire()
        assert (slot is None) == (len(self.held) + len(self.quarantined) == 4)
        if slot is None:
            return multiple()
        assert slot.index not in {other.index for other in self.held | self.quarantined}
        self.held.add(slot)
        return slot

    @rule(slot=consumes(slots))
    def release(self, slot: Slot) -> None:
        self.pool.release(slot)
        self.held.remove(slot)

    @rule(target=late, slot=consumes(slots))
    def quarantine(self, slot: Slot) -> Slot:
        self.pool.quarantine(slot)
        self.held.remove(slot)
        self.quarantined.add(slot)
        return slot

    @rule(slot=consumes(late))
    def transfer_over(self, slot: Slot) -> None:
        self.pool.transfer_over(slot)
        self.quarantined.remove(slot)

    @invariant()
    def adds_up(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        assert (counts.held, counts.quarantined) == (len(self.held), len(self.quarantined))
        assert counts.free + counts.held + counts.quarantined == counts.total


TestSlotMachine = SlotMachine.TestCase
