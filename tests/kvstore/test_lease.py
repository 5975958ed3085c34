import threading

import pytest
from epdserve.kvstore.lease import LeaseTable
from epdserve.kvstore.types import LeaseId
from support.manual_clock import ManualClock


class Ends:
    """Counts how often a lease's promise was taken back."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def leases(clock: ManualClock) -> LeaseTable:
    return LeaseTable(clock)


def test_ending_a_lease_in_time_says_that_it_held(leases: LeaseTable, clock: ManualClock) -> None:
    ends = Ends()
    lease = leases.grant(10.0, ends)
    clock.advance(9.999)
    assert leases.end(lease) is True
    assert ends.count == 1


def test_a_lease_that_ran_out_did_not_hold_even_if_nobody_collected_it(
    leases: LeaseTable, clock: ManualClock
) -> None:
    ends = Ends()
    lease = leases.grant(10.0, ends)
    clock.advance(10.0)
    assert leases.end(lease) is False
    assert ends.count == 1
    assert leases.expire() == 0


def test_expiry_collects_what_ran_out_and_nothing_else(leases: LeaseTable, clock: ManualClock) -> None:
    short, long = Ends(), Ends()
    gone = leases.grant(1.0, short)
    kept = leases.grant(5.0, long)
    clock.advance(1.0)
    assert leases.expire() == 1
    assert (short.count, long.count) == (1, 0)
    assert leases.end(gone) is False
    assert leases.end(kept) is True
    assert (short.count, long.count) == (1, 1)


def test_ending_twice_or_something_unknown_is_not_held(leases: LeaseTable) -> None:
    ends = Ends()
    lease = leases.grant(1.0, ends)
    assert leases.end(lease)
    assert not leases.end(lease)
    assert not leases.end(LeaseId("never granted"))
    assert ends.count == 1


def test_end_all_takes_every_promise_back(leases: LeaseTable) -> None:
    ends = Ends()
    for _ in range(3):
        leases.grant(1.0, ends)
    assert leases.end_all() == 3
    assert ends.count == 3
    assert leases.counts().held == 0


def test_counts_tell_how_leases_ended(leases: LeaseTable, clock: ManualClock) -> None:
    released = leases.grant(1.0, Ends())
    leases.grant(1.0, Ends())
    leases.grant(9.0, Ends())
    leases.end(released)
    clock.advance(1.0)
    leases.expire()
    counts = leases.counts()
    assert (counts.held, counts.released, counts.expired) == (1, 1, 1)


def test_names_cannot_be_guessed(leases: LeaseTable) -> None:
    names = {leases.grant(1.0, Ends()) for _ in range(100)}
    assert len(names) == 100
    assert all(len(name) == 32 for name in names)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan")])
def test_a_lease_without_time_is_refused(leases: LeaseTable, ttl_s: float) -> None:
    with pytest.raises(ValueError, match="ttl_s"):
        leases.grant(ttl_s, Ends())


def test_the_table_can_be_used_while_a_promise_is_taken_back(leases: LeaseTable) -> None:
    lease = leases.grant(1.0, lambda: seen.append(leases.counts().held))
    seen: list[int] = []
    leases.end(lease)
    assert seen == [0]


def test_ended_leases_leave_nothing_behind(leases: LeaseTable, clock: ManualClock) -> None:
    for _ in range(1000):
        leases.end(leases.grant(60.0, Ends()))
        leases.expire()
    assert len(leases._ends) == 0


def test_many_threads_end_each_lease_once(leases: LeaseTable) -> None:
    ends = Ends()
    names = [leases.grant(60.0, ends) for _ in range(200)]
    held: list[bool] = []
    threads = [
        threading.Thread(target=lambda: held.extend([leases.end(name) for name in names])) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(held) == 200
    assert ends.count == 200
