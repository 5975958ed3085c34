"""Fair shares of tenants: what each has had lately, and what the max-min rule would give it.

Service is counted in seconds of a worker: prefill tokens over speed, and decode residency (steps times the request's
part of a step), so that one number holds both. It fades, so an hour of quiet earns no hour of privilege.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from epdserve.services.policy.pools import Floats, floats

# What a tenant may have beyond its share before anybody minds: requests are lumps
FAIR_SLACK: Final = 0.2
# Shares are worked out anew when so much of all service is news
_NEWS: Final = 0.01
_LEAST_WEIGHT: Final = 1e-9
_FEW: Final = 48  # tenants


def max_min_shares(
    demands: Mapping[str, float], capacity: float, weights: Mapping[str, float] | None = None
) -> dict[str, float]:
    """What each tenant gets when nobody can get more without one who has less (per weight) losing some.

    Progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2).

    Args:
        demands: What each would take.
        capacity: What there is.
        weights: 1 for those not named.
    """
    known = weights or {}
    shares: dict[str, float] = {}
    left = capacity
    order = sorted(demands, key=lambda name: (demands[name] / known.get(name, 1.0), name))
    weight_left = sum(known.get(name, 1.0) for name in order)
    for name in order:
        weight = known.get(name, 1.0)
        shares[name] = min(demands[name], left * weight / weight_left if weight_left > 0 else 0.0)
        left -= shares[name]
        weight_left -= weight
    return shares


def water_level(demands: Floats, weights: Floats, capacity: float) -> float:
    """What each tenant gets a unit of weight at most under ``max_min_shares``; infinite if all get what they want.

    A share is then the lesser of its demand and of level times weight.

    Args:
        weights: Positive.
    """
    order = np.argsort(demands / weights, kind="stable")
    demands, weights = demands[order], weights[order]
    # If all before it get what they want, the rest share what is left
    levels = (capacity - (np.cumsum(demands) - demands)) / np.cumsum(weights[::-1])[::-1]
    short = np.flatnonzero(demands > weights * levels)
    return float(levels[short[0]]) if len(short) else float("inf")


@dataclass(frozen=True, slots=True)
class FairnessSettings:
    """Of the meter.

    Attributes:
        half_life_s: After so long a service counts half.
        limit: Tenants remembered; the one not heard of for longest goes first.
    """

    half_life_s: float = 10.0
    limit: int = 1024

    def __post_init__(self) -> None:
        if self.half_life_s <= 0 or self.limit < 1:
            raise ValueError(f"impossible settings: {self}")


class ServiceMeter:
    """What tenants asked for and were given lately. Bounded; time is an argument; owned by one thread."""

    def __init__(self, settings: FairnessSettings = FairnessSettings()) -> None:
        self._half_life_s = settings.half_life_s
        self._limit = settings.limit
        self._tenants: OrderedDict[str, list[float]] = OrderedDict()  # asked, given, as of
        self._others: dict[str, dict[str, tuple[float, float]]] = {}
        self._peers: dict[str, tuple[float, float]] = {}  # their sums, by tenant
        self._level, self._level_at = 0.0, 0.0
        self._total = self._news = 0.0

    def asked(self, tenant: str, cost_s: float, *, now: float) -> None:
        """Count a request's expected cost as wished for, admitted or not."""
        self._fade(tenant, now)[0] += cost_s
        self._news += abs(cost_s)

    def given(self, tenant: str, cost_s: float, *, now: float) -> None:
        """Count a cost as taken; negative to give back what was not used."""
        row = self._fade(tenant, now)
        row[1] = max(0.0, row[1] + cost_s)
        self._news += abs(cost_s)

    def excess(self, tenant: str, *, now: float, weights: Mapping[str, float] | None = None) -> float:
        """What a tenant has had lately over its max-min share of all that was given, less one; 0 for one alone.

        Above 0 it has had more than its share; -1 is a tenant that has had nothing of what it asked for.
        """
        if not self._others and len(self._tenants) < 2:
            return 0.0
        row, peer = self._tenants.get(tenant), self._peers.get(tenant, (0.0, 0.0))
        if row is None and tenant not in self._peers:
            return 0.0
        mine = (0.0, 0.0) if row is None else self._faded(row, now)
        given = mine[1] + peer[1]
        share = min(max(mine[0] + peer[0], given), _weight(weights, tenant) * self._water_level(now, weights))
        return given / share - 1 if share > 0 else 0.0

    def _water_level(self, now: float, weights: Mapping[str, float] | None) -> float:
        """As all service fades alike, so does the level; only news changes it."""
        kept = 0.5 ** (max(0.0, now - self._level_at) / self._half_life_s)
        if self._news > _NEWS * self._total * kept:
            names = list({**self._tenants, **self._peers})
            if len(names) <= _FEW:
                self._total, self._level = self._level_of_few(names, now, weights)
                self._news, self._level_at = 0.0, now
                return self._level
            nothing = [0.0, 0.0, now]
            rows = np.array([self._tenants.get(name, nothing) for name in names], dtype=np.float64)
            ages = np.maximum(0.0, now - rows[:, 2:])
            elsewhere = np.array([self._peers.get(name, (0.0, 0.0)) for name in names], dtype=np.float64)
            sums = rows[:, :2] * np.exp2(-ages / self._half_life_s) + elsewhere
            self._total, self._news, self._level_at = float(sums[:, 1].sum()), 0.0, now
            weighed = floats([_weight(weights, name) for name in names])
            self._level, kept = water_level(sums.max(axis=1), weighed, self._total), 1.0
        # All that everybody wants stays that
        return self._level if math.isinf(self._level) else self._level * kept

    def _level_of_few(
        self, names: list[str], now: float, weights: Mapping[str, float] | None
    ) -> tuple[float, float]:
        """All that was given, and the level: as below, where a loop is sooner done than a dozen calls of numpy."""
        wanted, total = [], 0.0
        for name in names:
            row, (asked, given) = self._tenants.get(name), self._peers.get(name, (0.0, 0.0))
            if row is not None:
                mine = self._faded(row, now)
                asked, given = asked + mine[0], given + mine[1]
            demand, weight = max(asked, given), _weight(weights, name)
            wanted.append((demand / weight, demand, weight))
            total += given
        left, weight_left = total, sum(weight for _, _, weight in wanted)
        for _, demand, weight in sorted(wanted):
            level = left / weight_left
            if demand > weight * level:
                return total, level
            left, weight_left = left - demand, max(_LEAST_WEIGHT, weight_left - weight)
        return total, float("inf")

    def snapshot(self, *, now: float) -> dict[str, tuple[float, float]]:
        """What this replica has counted, for ``merge`` at another one."""
        return {name: self._faded(row, now) for name, row in self._tenants.items()}

    def merge(self, replica: str, snapshot: Mapping[str, tuple[float, float]]) -> None:
        """Take another replica's snapshot in place of its last one; an empty one forgets it."""
        if snapshot:
            self._others[replica] = dict(list(snapshot.items())[: self._limit])
        else:
            self._others.pop(replica, None)
        self._peers = {}
        for rows in self._others.values():
            for name, (asked, given) in rows.items():
                known = self._peers.get(name, (0.0, 0.0))
                self._peers[name] = (known[0] + asked, known[1] + given)
        self._news = float("inf")

    def __len__(self) -> int:
        return len(self._tenants)

    def _fade(self, tenant: str, now: float) -> list[float]:
        row = self._tenants.get(tenant)
        if row is None:
            row = self._tenants[tenant] = [0.0, 0.0, now]
            if len(self._tenants) > self._limit:
                self._tenants.popitem(last=False)
        row[0], row[1] = self._faded(row, now)
        row[2] = max(now, row[2])
        self._tenants.move_to_end(tenant)
        return row

    def _faded(self, row: list[float], now: float) -> tuple[float, float]:
        if now <= row[2]:
            return row[0], row[1]
        kept = 0.5 ** ((now - row[2]) / self._half_life_s)
        return row[0] * kept, row[1] * kept


def _weight(weights: Mapping[str, float] | None, tenant: str) -> float:
    return max(_LEAST_WEIGHT, weights.get(tenant, 1.0)) if weights else 1.0


def jain_index(values: list[float]) -> float:
    """1 if all have the same, 1 / n if one has all (Jain, Chiu and Hawe 1984); 1 for nothing at all."""
    squares = sum(value * value for value in values)
    return 1.0 if not squares else sum(values) ** 2 / (len(values) * squares)
