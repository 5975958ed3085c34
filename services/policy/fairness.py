"""Fair shares of tenants: what each has had lately, and what the max-min rule would give it.

Service is counted in seconds of a worker: prefill tokens over speed, and decode residency (steps times the request's
part of a step), so that one number holds both. It fades, so an hour of quiet earns no hour of privilege.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

# What a tenant may have beyond its share before anybody minds: requests are lumps
FAIR_SLACK: Final = 0.2


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


class ServiceMeter:
    """What tenants asked for and were given lately. Bounded; time is an argument; owned by one thread.

    Args:
        half_life_s: After so long a service counts half.
        limit: Tenants remembered; the one not heard of for longest goes first.
    """

    def __init__(self, *, half_life_s: float = 10.0, limit: int = 1024) -> None:
        if half_life_s <= 0 or limit < 1:
            raise ValueError(f"half_life_s={half_life_s}, limit={limit}")
        self._half_life_s = half_life_s
        self._limit = limit
        self._tenants: OrderedDict[str, list[float]] = OrderedDict()  # asked, given, as of
        self._others: dict[str, dict[str, tuple[float, float]]] = {}

    def asked(self, tenant: str, cost_s: float, *, now: float) -> None:
        """Count a request's expected cost as wished for, admitted or not."""
        self._fade(tenant, now)[0] += cost_s

    def given(self, tenant: str, cost_s: float, *, now: float) -> None:
        """Count a cost as taken; negative to give back what was not used."""
        row = self._fade(tenant, now)
        row[1] = max(0.0, row[1] + cost_s)

    def excess(self, tenant: str, *, now: float, weights: Mapping[str, float] | None = None) -> float:
        """What a tenant has had lately over its max-min share of all that was given, less one; 0 for one alone.

        Above 0 it has had more than its share; -1 is a tenant that has had nothing of what it asked for.
        """
        if not self._others and len(self._tenants) < 2:
            return 0.0
        rows = {name: self._faded(row, now) for name, row in self._tenants.items()}
        for peers in self._others.values():
            for name, (asked, given) in peers.items():
                mine = rows.get(name, (0.0, 0.0))
                rows[name] = (mine[0] + asked, mine[1] + given)
        if tenant not in rows or len(rows) < 2:
            return 0.0
        total = sum(given for _, given in rows.values())
        share = max_min_shares({name: max(row) for name, row in rows.items()}, total, weights)[tenant]
        return rows[tenant][1] / share - 1 if share > 0 else 0.0

    def snapshot(self, *, now: float) -> dict[str, tuple[float, float]]:
        """What this replica has counted, for ``merge`` at another one."""
        return {name: self._faded(row, now) for name, row in self._tenants.items()}

    def merge(self, replica: str, snapshot: Mapping[str, tuple[float, float]]) -> None:
        """Take another replica's snapshot in place of its last one; an empty one forgets it."""
        if snapshot:
            self._others[replica] = dict(list(snapshot.items())[: self._limit])
        else:
            self._others.pop(replica, None)

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
        kept = 0.5 ** (max(0.0, now - row[2]) / self._half_life_s)
        return row[0] * kept, row[1] * kept


def jain_index(values: list[float]) -> float:
    """1 if all have the same, 1 / n if one has all (Jain, Chiu and Hawe 1984); 1 for nothing at all."""
    squares = sum(value * value for value in values)
    return 1.0 if not squares else sum(values) ** 2 / (len(values) * squares)
