"""What is kept of a view: the same answers as from records read anew, and nothing of workers that have gone."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

import pytest
from epdserve.services.policy.forecast import fixed
from epdserve.services.router.estimates import Estimates
from epdserve.services.router.fleets import Fleets
from epdserve.services.router.ledger import InFlight, InFlightLedger
from epdserve.services.router.routing import Placer
from epdserve.services.router.worker_rows import WorkerRows
from epdserve.services.schedule import Schedule
from epdserve.services.types import DecodeReceipt, WorkerInfo, WorkerRole, WorkerState, token_ids
from support.fake_cluster import FakeCluster, worker_info

KEY = b"k" * 32


def fleet(count: int, *, life: str = "1") -> tuple[WorkerInfo, ...]:
    roles = (WorkerRole.PREFILL, WorkerRole.DECODE)
    return tuple(
        worker_info(f"{role.value[0]}{n}", role, machine=f"m{n}", incarnation=life)
        for role in roles
        for n in range(count)
    )


class Views(FakeCluster):
    """Shows tuples, as the registry's view does."""

    def __init__(self, view: Sequence[WorkerInfo]) -> None:
        super().__init__()
        self.view = tuple(view)

    def workers(self) -> Sequence[WorkerInfo]:
        return self.view


async def place(placer: Placer, number: int = 0) -> tuple[str, str]:
    route = await placer.place(
        token_ids(range(50)), tenant_key=KEY, forecast=fixed(100), request_id=str(number)
    )
    return route.prefill.worker, route.decode.worker


async def test_arrays_of_a_view_are_kept_and_what_changes_between_requests_is_not() -> None:
    cluster, ledger, estimates = Views(fleet(3)), InFlightLedger(), Estimates(clock=lambda: 1.0)
    placer = Placer(cluster, ledger, estimates=estimates)
    assert await place(placer) == ("p0", "d0")
    with ledger.hold("p0", 9000), ledger.hold("d0", 9000, output_tokens=900):
        assert await place(placer) == ("p1", "d1")
        ledger.hear({"p1": InFlight(1, 9000), "d1": InFlight(9, 9000, 900.0)}, routers=1)
        ledger.alone = True
        assert await place(placer) == ("p2", "d2")
    ledger.hear({}, routers=0)
    for _ in range(20):
        estimates.failed("p0")
        estimates.failed("d0")
    # The clock stands still: it is the failure that has what was measured looked at again
    assert await place(placer) == ("p1", "d1")
    cluster.view = tuple(
        dataclasses.replace(info, state=WorkerState.DRAINING) if info.worker in ("p1", "d1") else info
        for info in cluster.view
    )
    assert await place(placer) == ("p2", "d2")


async def test_what_was_prepared_is_what_decisions_read() -> None:
    cluster, ledger = Views(fleet(3)), InFlightLedger()
    placer = Placer(cluster, ledger, estimates=Estimates(clock=lambda: 1.0))
    placer.prepare()
    (made,) = placer._fleets.of((), deterministic=False).values()
    measured = made.look_again()
    await place(placer)
    assert placer._fleets.of((), deterministic=False) == {next(iter(placer._fleets._made[False])): made}
    assert made.look_again() is measured
    cluster.view = tuple(dataclasses.replace(info, running=7) for info in cluster.view)
    placer.prepare()
    (again,) = placer._fleets.of((), deterministic=False).values()
    assert again is not made
    assert await place(placer) == ("p0", "d0")


async def test_a_life_that_was_lost_is_avoided_by_one_request_only() -> None:
    cluster, ledger = Views(fleet(2)), InFlightLedger()
    fleets = Fleets(cluster, ledger, Estimates())
    (whole,) = fleets.of((), deterministic=False).values()
    (rest,) = fleets.of({("p0", "1")}, deterministic=False).values()
    assert [info.worker for info in rest.prefills] == ["p1"]
    assert fleets.of((), deterministic=False)[next(iter(fleets.of((), deterministic=False)))] is whole
    assert fleets.of({("p0", "1"), ("p1", "1")}, deterministic=False) == {}
    assert fleets.missing({("p0", "1"), ("p1", "1")}) == "prefill"
    cluster.view = fleet(2, life="2")
    (risen,) = fleets.of({("p0", "1")}, deterministic=False).values()
    assert [info.worker for info in risen.prefills] == ["p0", "p1"]


async def test_workers_that_come_and_go_every_second_leave_nothing_behind() -> None:
    draw, cluster = random.Random(1), Views(fleet(4))
    ledger, estimates = InFlightLedger(), Estimates()
    placer, used = Placer(cluster, ledger, estimates=estimates), Counter[str]()
    with ExitStack() as held:
        for second in range(300):
            names = sorted(draw.sample(range(second, second + 12), 6))
            cluster.view = tuple(
                worker_info(f"{role.value[0]}{n}", role, machine=f"m{n}", queued_tokens=draw.randrange(100))
                for role in (WorkerRole.DECODE, WorkerRole.PREFILL)
                for n in names
            )
            for number in range(3):
                prefill, decode = await place(placer, 10 * second + number)
                assert {prefill, decode} <= {info.worker for info in cluster.view}
                used.update((prefill, decode))
                if draw.random() < 0.02:
                    held.enter_context(ledger.hold(decode, 10, output_tokens=5.0))
                estimates.decoded(decode, DecodeReceipt(decode, steps=10, decode_ms=draw.uniform(10, 20)))
        assert estimates.workers <= 2 * 12 + 8
        assert len(ledger.rows(())) == 0
        # Of the long gone only those are known that somebody still waits for
        assert len(ledger._table) <= 2 * (12 + len(ledger.own)) + 8
    assert len(used) > 200
    assert not ledger.own


def test_rows_are_found_again_after_some_were_forgotten() -> None:
    rows = WorkerRows(2)
    for n in range(100):
        rows.of(f"w{n}")[0] = n
    before = rows.layout
    rows.keep([f"w{n}" for n in range(90, 100)])
    assert (len(rows), rows.layout) == (10, before + 1)
    assert rows.values[0, rows.rows(["w95", "w90"])].tolist() == [95, 90]
    assert rows.of("new").tolist() == [0, 0]
    assert "w3" not in rows


@pytest.mark.parametrize("kind", [WorkerInfo, Schedule])
def test_clocks_may_be_apart_by_anything_as_no_time_of_day_is_told(kind: type) -> None:
    times = [field.name for field in dataclasses.fields(kind) if field.name.endswith(("_at", "_time", "_ts"))]
    assert times == []
