from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest
from epdserve.kvstore.errors import CorruptBlock
from epdserve.kvstore.host_metrics import SwaPoolMetrics
from epdserve.kvstore.lease import LeaseTable
from epdserve.kvstore.slots import Slot
from epdserve.kvstore.staging import Bytes, StagingPool
from epdserve.kvstore.swa_pool import PinnedTail, SwaPool
from epdserve.kvstore.tails import TailId, TailInfo, TailPlace, rest_digest
from epdserve.kvstore.types import BlockOwner
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from prometheus_client import CollectorRegistry
from support.kv_blocks import toy_checksum
from support.manual_clock import ManualClock

T = TypeVar("T")

RECORD, PAYLOAD, TTL_S = 4096, 4000, 180.0


def tail(number: int, *, exact: bool = True) -> tuple[TailInfo, Bytes]:
    """A valid tail whose bytes follow from its number and its exactness."""
    record = np.random.default_rng([number, exact]).integers(0, 256, RECORD, dtype=np.uint8)
    identity = TailId(number.to_bytes(16, "little"))
    return TailInfo(identity, toy_checksum(record[:PAYLOAD].data, identity), exact), record


class Stage:
    def __init__(self, slots: int = 3) -> None:
        self.clock, self.registry = ManualClock(), CollectorRegistry()
        self.slots = StagingPool("tails", slot_bytes=RECORD, count=slots)
        self.leases = LeaseTable(self.clock)
        metrics = SwaPoolMetrics(self.registry)
        self.pool = SwaPool(
            self.slots,
            payload_bytes=PAYLOAD,
            ttl_s=TTL_S,
            clock=self.clock,
            leases=self.leases,
            metrics=metrics,
        )
        metrics.watch(held_bytes=self.pool.held_bytes, pinned=self.pool.pinned)

    def put(self, number: int, *, exact: bool = True) -> bool:
        info, record = tail(number, exact=exact)
        return self.pool.put(record, info, checksum=toy_checksum)

    def get(self, number: int, *, exact: bool = False) -> PinnedTail | None:
        return self.pool.get(tail(number)[0].identity, exact=exact)

    def numbers(self) -> list[int]:
        return [int.from_bytes(info.identity, "little") for info, _ in self.pool.held()]

    def value(self, noun: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"epdserve_kvstore_{noun}", labels)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_a_tail_is_found_by_its_identity_and_by_no_other(stage: Stage) -> None:
    assert stage.put(1)
    with _held(stage.get(1)) as found:
        assert found.info == tail(1)[0]
        assert np.array_equal(found.record, tail(1)[1])
        with pytest.raises(ValueError, match="read-only"):
            found.record[0] = 1
    assert stage.get(2) is None
    assert stage.value("tails_total", result="hit") == stage.value("tails_total", result="miss") == 1
    assert stage.value("tail_bytes") == RECORD


def test_a_tail_is_missing_once_its_time_has_passed(stage: Stage) -> None:
    stage.put(1)
    stage.clock.advance(TTL_S - 0.001)
    _held(stage.get(1)).release()
    stage.clock.advance(0.001)
    assert stage.get(1) is None
    assert stage.value("tails_total", result="expired") == 1
    assert len(stage.pool) == stage.pool.held_bytes() == 0
    assert stage.pool.expire() == 1
    assert stage.slots.counts().free == 3


def test_sealing_again_renews_the_time_and_keeps_the_first_bytes(stage: Stage) -> None:
    stage.put(1)
    stage.put(2)
    stage.clock.advance(100.0)
    info, record = tail(1)
    assert stage.pool.put(record, info)
    stage.clock.advance(100.0)
    assert stage.get(2) is None
    with _held(stage.get(1)) as found:
        assert np.array_equal(found.record, record)
    assert stage.value("tail_puts_total", result="duplicate") == 1
    assert stage.slots.counts().held == 2


def test_expired_slots_are_used_again_before_anybody_living_loses_one(stage: Stage) -> None:
    stage.put(1)
    stage.clock.advance(TTL_S / 2)
    stage.put(2)
    stage.put(3)
    stage.clock.advance(TTL_S / 2)
    assert stage.put(4)
    assert stage.numbers() == [2, 3, 4]
    assert stage.value("tail_evictions_total", reason="expired") == 1
    assert stage.value("tail_evictions_total", reason="space") == 0


def test_the_oldest_goes_under_pressure_unless_it_is_read(stage: Stage) -> None:
    for number in (1, 2, 3):
        stage.put(number)
        stage.clock.advance(1.0)
    reader = _held(stage.get(1))
    assert stage.put(4)
    assert stage.numbers() == [1, 3, 4]
    assert stage.value("tail_evicted_age_seconds_sum") == 2.0
    pins = [reader, _held(stage.get(3)), _held(stage.get(4))]
    assert not stage.put(5)
    assert stage.value("tail_puts_total", result="refused") == 1
    assert stage.value("tails_pinned") == 3
    for pin in pins:
        pin.release()
    with pytest.raises(ValueError, match="released"):
        pins[0].release()


def test_an_expired_tail_keeps_its_bytes_for_its_last_reader(stage: Stage) -> None:
    stage.put(1)
    first, second = _held(stage.get(1)), _held(stage.get(1))
    stage.clock.advance(TTL_S)
    for number in (2, 3):
        assert stage.put(number)
    assert stage.get(1) is None
    first.release()
    assert np.array_equal(second.record, tail(1)[1])
    assert stage.slots.counts().free == 0
    second.release()
    assert stage.slots.counts().free == 1
    stage.pool.check()


def test_a_lease_pins_a_tail_until_it_ends_or_its_time_does(stage: Stage) -> None:
    stage.put(1)
    stage.put(2)
    identity = tail(1)[0].identity
    assert stage.pool.lend(TailId(b"?" * 16), 5.0) is None
    with pytest.raises(ValueError, match="ttl_s"):
        stage.pool.lend(identity, 0.0)
    loan, late = _held(stage.pool.lend(identity, 5.0)), _held(stage.pool.lend(tail(2)[0].identity, 5.0))
    assert loan.info == tail(1)[0]
    assert np.array_equal(stage.slots.bytes_of(loan.slot), tail(1)[1])
    assert stage.pool.pinned() == 2
    assert stage.leases.end(loan.lease)
    stage.clock.advance(5.0)
    assert stage.leases.expire() == 1
    assert not stage.leases.end(late.lease)
    assert stage.pool.pinned() == 0


def test_only_an_exact_tail_replaces_a_tainted_one(stage: Stage) -> None:
    stage.put(1, exact=False)
    assert stage.get(1, exact=True) is None
    reader = _held(stage.get(1))
    stage.put(1, exact=True)
    stage.put(1, exact=False)
    assert np.array_equal(reader.record, tail(1, exact=False)[1])
    reader.release()
    with _held(stage.get(1, exact=True)) as found:
        assert np.array_equal(found.record, tail(1)[1])
    assert stage.slots.counts().held == 1


def test_other_bytes_than_promised_are_not_kept(stage: Stage) -> None:
    info, record = tail(1)
    record[PAYLOAD - 1] ^= 1
    with pytest.raises(CorruptBlock):
        stage.pool.put(record, info, checksum=toy_checksum)
    with pytest.raises(ValueError, match="4096"):
        stage.pool.put(record[:-1], info)
    assert stage.slots.counts().free == 3


def test_impossible_pools_and_tails_are_refused(stage: Stage) -> None:
    for payload_bytes, ttl_s in ((0, 1.0), (RECORD + 1, 1.0), (RECORD, 0.0)):
        with pytest.raises(ValueError, match="impossible"):
            SwaPool(stage.slots, payload_bytes=payload_bytes, ttl_s=ttl_s)
    with pytest.raises(ValueError, match="impossible"):
        TailInfo(TailId(b"short"), 0, True)


numbers = st.integers(1, 6)


class SwaPoolMachine(RuleBasedStateMachine):
    """Against a list of (number, exact, time of sealing), oldest first."""

    filling = Bundle("filling")
    late = Bundle("late")
    reading = Bundle("reading")

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage(slots=4)
        self.tails: list[_ModelTail] = []
        self.leaving: list[_ModelTail] = []
        self.filling_count = self.late_count = 0

    @rule(seconds=st.sampled_from([1.0, TTL_S / 3, TTL_S]))
    def wait(self, seconds: float) -> None:
        self.stage.clock.advance(seconds)

    @rule(number=numbers, exact=st.booleans())
    def put(self, number: int, exact: bool) -> None:
        expected = self._reserve()
        if expected:
            self._seal(number, exact)
        assert self.stage.put(number, exact=exact) == expected

    @rule(target=filling)
    def reserve(self) -> object:
        expected, slot = self._reserve(), self.stage.pool.reserve()
        assert (slot is not None) == expected
        return multiple() if slot is None else slot

    @rule(slot=consumes(filling), number=numbers, exact=st.booleans())
    def seal(self, slot: Slot, number: int, exact: bool) -> None:
        info, record = tail(number, exact=exact)
        self.stage.slots.bytes_of(slot)[:] = record
        self.stage.pool.seal(slot, info, checksum=toy_checksum)
        self._seal(number, exact)

    @rule(slot=consumes(filling))
    def abort(self, slot: Slot) -> None:
        self.stage.pool.abort(slot)
        self.filling_count -= 1

    @rule(target=late, slot=consumes(filling))
    def quarantine(self, slot: Slot) -> Slot:
        self.stage.pool.quarantine(slot)
        self.filling_count -= 1
        self.late_count += 1
        return slot

    @rule(slot=consumes(late))
    def transfer_over(self, slot: Slot) -> None:
        self.stage.pool.transfer_over(slot)
        self.late_count -= 1

    @rule(target=reading, number=numbers, exact=st.booleans())
    def get(self, number: int, exact: bool) -> object:
        expected = next((t for t in self._living() if t.number == number and t.exact >= exact), None)
        found = self.stage.get(number, exact=exact)
        assert (found is None) == (expected is None)
        if found is None or expected is None:
            return multiple()
        assert found.info.exact == expected.exact
        expected.pins += 1
        return found, expected

    @rule(read=consumes(reading))
    def release(self, read: tuple[PinnedTail, _ModelTail]) -> None:
        pin, model = read
        assert np.array_equal(pin.record, tail(model.number, exact=model.exact)[1])
        pin.release()
        model.pins -= 1
        self.leaving = [other for other in self.leaving if other.pins]

    @rule(number=numbers)
    def delete(self, number: int) -> None:
        held = [t for t in self.tails if t.number == number]
        assert self.stage.pool.delete([tail(number)[0].identity]) == len(held)
        for model in held:
            self._forget(model)

    @rule()
    def expire(self) -> None:
        assert self.stage.pool.expire() == self._collect()

    @invariant()
    def adds_up(self) -> None:
        self.stage.pool.check()
        assert self.stage.numbers() == [t.number for t in self._living()]
        assert self.stage.slots.counts().free == self._free()
        assert self.stage.pool.pinned() == sum(t.pins > 0 for t in self.tails) + len(self.leaving)

    def _living(self) -> list[_ModelTail]:
        return [t for t in self.tails if self.stage.clock.now < t.sealed_at + TTL_S]

    def _free(self) -> int:
        return 4 - len(self.tails) - len(self.leaving) - self.filling_count - self.late_count

    def _forget(self, model: _ModelTail) -> None:
        self.tails = [other for other in self.tails if other is not model]
        if model.pins:
            self.leaving.append(model)

    def _collect(self) -> int:
        expired = [t for t in self.tails if t not in self._living()]
        for model in expired:
            self._forget(model)
        return len(expired)

    def _reserve(self) -> bool:
        self._collect()
        if not self._free():
            idle = [t for t in self.tails if not t.pins]
            if not idle:
                return False
            self._forget(idle[0])
        self.filling_count += 1
        return True

    def _seal(self, number: int, exact: bool) -> None:
        self.filling_count -= 1
        self._collect()
        held = next((t for t in self.tails if t.number == number), None)
        if held is not None and (held.exact or not exact):
            self.tails = [*(t for t in self.tails if t is not held), held]
            held.sealed_at = self.stage.clock.now
            return
        if held is not None:
            self._forget(held)
        self.tails.append(_ModelTail(number, exact, self.stage.clock.now))


class _ModelTail:
    def __init__(self, number: int, exact: bool, sealed_at: float) -> None:
        self.number, self.exact, self.sealed_at, self.pins = number, exact, sealed_at, 0


TestSwaPoolMachine = SwaPoolMachine.TestCase
TestSwaPoolMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def _held(value: T | None) -> T:
    assert value is not None
    return value


def test_the_longest_tail_that_fits_a_prompt_is_found_by_its_parent() -> None:
    pool, parent = Stage().pool, b"p" * 16
    owner = BlockOwner(b"t" * 16, b"r" * 16)
    for number, after in enumerate(([1], [1, 2], [1, 3])):
        info, record = tail(number, exact=number != 1)
        place = TailPlace(parent, len(after), rest_digest(np.array(after)))
        assert pool.put(record, replace(info, place=place, owner=owner), checksum=toy_checksum)
    prompt = np.array([1, 2, 9])
    longest, exact = pool.longest(parent, prompt), pool.longest(parent, prompt, exact=True)
    assert longest is not None
    assert longest.identity == tail(1)[0].identity
    assert exact is not None
    assert exact.identity == tail(0)[0].identity
    assert pool.longest(b"q" * 16, prompt) is None
    assert pool.longest(parent, np.array([7])) is None
    pool.check()
    deleted = pool.delete_owned(lambda one: one == owner)
    assert {info.identity for info in deleted} == {tail(number)[0].identity for number in range(3)}
    assert pool.longest(parent, prompt) is None
    pool.check()


def test_an_expired_tail_fits_no_prompt() -> None:
    stage = Stage()
    info, record = tail(1)
    place = TailPlace(b"p" * 16, 0, rest_digest(np.array([], np.int64)))
    stage.pool.put(record, replace(info, place=place))
    stage.clock.advance(TTL_S)
    assert stage.pool.longest(b"p" * 16, np.array([1])) is None
    stage.pool.expire()
    stage.pool.check()
