"""Fair shares of tenants: what each has had lately, and what the max-min rule would give it.

Service is counted in seconds of a worker: prefill tokens over speed, and decode residency (steps times the request's
part of a step), so that one number holds both. It fades, so an hour of quiet earns no hour of privilege.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

_SHARES_S: Final = 0.1


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
        self._denied = [0.0, 0.0]  # amount, as of
        self._shares: dict[str, float] = {}
        self._given = 0.0
        self._shares_at = float("-inf")

    def asked(self, tenant: str, cost_s: float, *, now: float) -> None:
        """Count a request's expected cost as wished for, admitted or not."""
        self._fade(tenant, now)[0] += cost_s

    def given(self, tenant: str, cost_s: float, *, now: float) -> None:
        """Count a cost as taken; negative to give back what was not used."""
        row = self._fade(tenant, now)
        row[1] = max(0.0, row[1] + cost_s)

    def denied(self, cost_s: float, *, now: float) -> None:
        """Count a cost that a tenant within its share was refused, because there was no room."""
        self._denied[0] = self._faded_one(self._denied, now) + cost_s
        self._denied[1] = now

    def shortage(self, *, now: float) -> float:
        """Share of what should have been given lately that could not be; 0 = nobody within its share went without."""
        denied = self._faded_one(self._denied, now)
        return denied / (denied + self._total(now)) if denied else 0.0

    def over_share(
        self, tenant: str, *, now: float, weights: Mapping[str, float] | None = None, tolerance: float = 0.05
    ) -> bool:
        """Whether a tenant has had more than its max-min share of all that was given lately.

        Shares are worked out ten times a second, not for every request.
        """
        row = self._tenants.get(tenant)
        if row is None:
            return False
        self._total(now, weights)
        _, given = self._with_others(tenant, self._faded(row, now))
        return len(self._shares) > 1 and given > (1 + tolerance) * self._shares.get(tenant, given)

    def snapshot(self, *, now: float) -> dict[str, tuple[float, float]]:
        """What this replica has counted, for ``merge`` at another one."""
        return {name: self._faded(row, now) for name, row in self._tenants.items()}

    def merge(self, replica: str, snapshot: Mapping[str, tuple[float, float]]) -> None:
        """Take another replica's snapshot in place of its last one; an empty one forgets it."""
        if snapshot:
            self._others[replica] = dict(list(snapshot.items())[: self._limit])
        else:
            self._others.pop(replica, None)
        self._shares_at = float("-inf")

    def __len__(self) -> int:
        return len(self._tenants)

    def _total(self, now: float, weights: Mapping[str, float] | None = None) -> float:
        """All that was given lately; shares of it are made anew if they are old."""
        if not 0 <= now - self._shares_at < _SHARES_S:
            names = {*self._tenants, *(name for peers in self._others.values() for name in peers)}
            rows = {
                name: self._with_others(name, self._faded(self._tenants.get(name, [0.0, 0.0, now]), now))
                for name in sorted(names)
            }
            self._given = sum(given for _, given in rows.values())
            demands = {name: max(row) for name, row in rows.items()}
            self._shares = max_min_shares(demands, self._given, weights)
            self._shares_at = now
        return self._given

    def _with_others(self, name: str, row: tuple[float, float]) -> tuple[float, float]:
        others = [peers[name] for peers in self._others.values() if name in peers]
        return row[0] + sum(asked for asked, _ in others), row[1] + sum(given for _, given in others)

    def _faded_one(self, pair: list[float], now: float) -> float:
        return float(pair[0] * 0.5 ** (max(0.0, now - pair[1]) / self._half_life_s))

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
