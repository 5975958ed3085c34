from __future__ import annotations

import random

import pytest
from epdserve.services.policy import fairness
from epdserve.services.policy.fairness import (
    FairnessSettings,
    ServiceMeter,
    jain_index,
    max_min_shares,
    water_level,
)
from epdserve.services.policy.pools import floats
from hypothesis import given
from hypothesis import strategies as st


def test_who_wants_little_gets_it_and_the_others_share_the_rest() -> None:
    assert max_min_shares({"a": 1, "b": 10, "c": 10}, 9) == {"a": 1, "b": 4, "c": 4}


def test_weights_count() -> None:
    assert max_min_shares({"a": 10, "b": 10}, 9, {"a": 2.0}) == {"a": 6, "b": 3}


@given(
    demands=st.dictionaries(st.text(max_size=3), st.floats(0, 1e6), max_size=8), capacity=st.floats(0, 1e6)
)
def test_shares_never_exceed_demand_or_capacity_and_waste_nothing(
    demands: dict[str, float], capacity: float
) -> None:
    shares = max_min_shares(demands, capacity)
    assert all(shares[name] <= demands[name] for name in demands)
    assert sum(shares.values()) == pytest.approx(min(capacity, sum(demands.values())), abs=1e-6)


@given(
    rows=st.lists(st.tuples(st.floats(0, 1e6), st.floats(0.1, 10)), min_size=1, max_size=8),
    capacity=st.floats(0, 1e6),
)
def test_the_level_says_the_same_as_the_shares(rows: list[tuple[float, float]], capacity: float) -> None:
    demands, weights = floats([row[0] for row in rows]), floats([row[1] for row in rows])
    names = [str(number) for number in range(len(rows))]
    told = dict(zip(names, demands.tolist(), strict=True)), dict(zip(names, weights.tolist(), strict=True))
    shares = max_min_shares(told[0], capacity, told[1])
    level = water_level(demands, weights, capacity)
    for name, demand, weight in zip(names, demands, weights, strict=True):
        assert min(demand, level * weight) == pytest.approx(shares[name], rel=1e-6, abs=1e-6)


def test_news_of_many_small_requests_are_not_missed() -> None:
    draw, meter, now = random.Random(1), ServiceMeter(), 0.0
    for _ in range(3000):
        now += 0.01
        tenant = f"t{min(4, int(draw.expovariate(1.0)))}"
        meter.asked(tenant, 0.02, now=now)
        if draw.random() < 0.7:
            meter.given(tenant, 0.02, now=now)
    rows = meter.snapshot(now=now)
    total = sum(had for _, had in rows.values())
    shares = max_min_shares({name: max(row) for name, row in rows.items()}, total)
    for name, (_, had) in rows.items():
        assert meter.excess(name, now=now) == pytest.approx(had / shares[name] - 1, abs=0.03)
    # Nor what little comes after a long rest
    for tenant in ("t0", "new"):
        meter.asked(tenant, 1e-6, now=now + 600)
    meter.given("new", 1e-6, now=now + 600)
    assert meter.excess("new", now=now + 600) > 0.5


def test_a_greedy_tenant_is_over_its_share_and_a_modest_one_is_not() -> None:
    meter = ServiceMeter()
    for tenant, cost in (("greedy", 9.0), ("modest", 1.0)):
        meter.asked(tenant, cost * 2, now=0.0)
        meter.given(tenant, cost, now=0.0)
    assert meter.excess("greedy", now=0.0) > 0.05
    assert meter.excess("modest", now=0.0) <= 0.05


def test_a_tenant_alone_is_never_over_its_share() -> None:
    meter = ServiceMeter()
    meter.given("only", 100.0, now=0.0)
    assert meter.excess("only", now=0.0) <= 0.05
    assert meter.excess("unknown", now=0.0) <= 0.05


def test_what_was_had_is_forgotten() -> None:
    meter = ServiceMeter(FairnessSettings(half_life_s=1.0))
    for tenant, cost in (("early", 8.0), ("late", 1.0)):
        meter.given(tenant, cost, now=0.0)
        meter.asked(tenant, cost, now=0.0)
    meter.asked("late", 50.0, now=10.0)
    meter.given("late", 1.0, now=10.0)
    assert meter.excess("early", now=10.0) <= 0.05


def test_tenants_remembered_are_bounded_and_other_routers_count() -> None:
    meter = ServiceMeter(FairnessSettings(limit=4))
    for number in range(100):
        meter.given(f"t{number}", 1.0, now=0.0)
    assert len(meter) == 4
    meter = ServiceMeter()
    meter.asked("a", 4.0, now=0.0)
    meter.given("a", 2.0, now=0.0)
    meter.merge("other", {"a": (8.0, 8.0), "b": (10.0, 1.0)})
    assert meter.excess("a", now=0.0) > 0.05
    meter.merge("other", {})
    assert meter.excess("a", now=0.0) <= 0.05


def test_jain() -> None:
    assert jain_index([3, 3, 3]) == pytest.approx(1)
    assert jain_index([9, 0, 0]) == pytest.approx(1 / 3)
    assert jain_index([]) == 1


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 100), st.floats(-50, 100)), max_size=30),
    st.dictionaries(st.sampled_from("abcd"), st.floats(0.1, 10)),
)
def test_not_everybody_is_above_its_share(
    rows: list[tuple[str, float, float]], weights: dict[str, float]
) -> None:
    meter = ServiceMeter()
    for at, (tenant, wished, had) in enumerate(rows):
        meter.asked(tenant, wished, now=float(at))
        meter.given(tenant, had, now=float(at))
    excesses = [meter.excess(tenant, now=40.0, weights=weights) for tenant in "abcd"]
    assert min(excesses) <= 1e-9
    assert all(excess >= -1 for excess in excesses)


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50), st.floats(0, 30)), min_size=2, max_size=30),
    st.booleans(),
)
def test_the_level_of_few_is_that_of_many(told: list[tuple[float, float, float]], weighed: bool) -> None:
    weights = {f"t{at}": 0.5 + at % 3 for at in range(len(told))} if weighed else None
    found = []
    for few in (0, 48):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fairness, "_FEW", few)
            meter = ServiceMeter()
            for at, (asked, given_s, when) in enumerate(told):
                meter.asked(f"t{at}", asked, now=when)
                meter.given(f"t{at}", given_s, now=when)
            names = [f"t{at}" for at in range(len(told))]
            found.append([meter.excess(name, now=31.0, weights=weights) for name in names])
    assert found[0] == pytest.approx(found[1], rel=1e-6, abs=1e-6)
