"""Prefill and decode worker chosen together, with the transfer between them, in shares of the request's targets.

The cost of a pair is the expected time to the first token over its target plus the expected time per token over its
target, plus what the request takes from others: work that later prompts wait behind, and slower steps for everybody
who decodes there. A target that is expected to be missed costs extra, and so do pages that will not suffice.

    hit_p          the tier that is soonest: min over tiers of fetch + (T - hit + rerun) / speed
    ttft_pd        ahead_p / speed_p + soonest_p + transfer_pd + step_d + trouble
    tpot_d         step + request (n_d + 1) + token (held_d + T + E[L] / 2); n_d on average over the request's life
    others_p       crowd * compute_p / ttft_target
    others_d       crowd * n_d * (request + token (T + E[L] / 2)) / tpot_target
    cost           ttft / ttft_target + tpot / tpot_target + others + miss * (excess over the targets) + overflow

Several routers that know the same stale loads would all run to the same worker. So every pair whose cost is within
``slack_per_s`` x staleness of the best counts as equally good. One of them is taken by a hash: of the prompt's first
block for prefill, so that what will share a prefix stays together before anything is cached, of the request for decode.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Final
from zlib import crc32

import numpy as np
from epdserve.services.policy.forecast import LengthForecast
from epdserve.services.policy.pools import DecodePool, Floats, Indices, Links, PrefillPool

_MIX: Final = 0x9E3779B1
_BLIND_TOKENS: Final = 512.0  # counted on where lengths are switched off
_VERSION: Final = 1  # of pair_costs.c: a module left over from another version is not used


def _load() -> ModuleType | None:
    """The same arithmetic compiled, where the package was installed with a C compiler."""
    try:
        module = importlib.import_module("epdserve.services.policy._pair_costs")
    except ImportError:
        return None
    return module if module.VERSION == _VERSION else None


_native = _load()


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """Weights of the cost.

    Attributes:
        prefill_crowd, decode_crowd: How many others a second of work is taken from.
        foresight: How far requests that are expected to end soon count as gone; 1 = nobody comes in their place.
        miss: Price of each multiple of a target that the expectation lies above it.
        overflow: Price of a worker whose pages are expected to run out.
        slack_per_s, max_slack: Costs this far apart count as equal, a second of staleness, and at most.
        shortlist: Workers of each role whose pairs are looked at.
        tier_weights, use_lengths, use_transfer: Off for ablations only.
    """

    prefill_crowd: float = 1.0
    decode_crowd: float = 1.0
    foresight: float = 0.5
    miss: float = 4.0
    overflow: float = 4.0
    slack_per_s: float = 0.2
    max_slack: float = 0.5
    shortlist: int = 8
    tier_weights: bool = True
    use_lengths: bool = True
    use_transfer: bool = True


@dataclass(frozen=True, slots=True)
class Placing:
    """A request that wants a place.

    Attributes:
        rerun_tokens: Rows run again before a hit.
        affinity: Names the prompt's beginning; the same for prompts that share it.
        staleness_s: Age of the loads.
    """

    request_id: str
    prompt_tokens: int
    forecast: LengthForecast
    ttft_target_s: float
    tpot_target_s: float
    bytes_per_token: float
    rerun_tokens: int = 128
    affinity: bytes = b""
    staleness_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pair that was looked at, and what it was expected to give."""

    prefill: str
    decode: str
    cost: float
    ttft_s: float
    tpot_s: float
    hit_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """The pair chosen, and why.

    Attributes:
        compute_tokens: Tokens the prefill worker is expected to compute.
        looked_at: What ``explain`` reads: names and costs of the pairs that were compared.
    """

    chosen: Candidate
    compute_tokens: int
    looked_at: _Pairs

    def explain(self, count: int = 16) -> list[Candidate]:
        """The pairs compared, cheapest first."""
        costs = self.looked_at.costs
        order = np.argsort(costs, axis=None, kind="stable")[:count]
        return [self.looked_at.candidate(*divmod(int(flat), costs.shape[1])) for flat in order]


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """Rows are prefill workers, columns decode workers."""

    rows: Sequence[str]
    columns: Sequence[str]
    costs: Floats
    ttft_s: Floats
    tpot_s: Floats
    hits: Floats
    compute: Floats

    def candidate(self, row: int, column: int) -> Candidate:
        return Candidate(
            self.rows[row],
            self.columns[column],
            float(self.costs[row, column]),
            float(self.ttft_s[row, column]),
            float(self.tpot_s[column]),
            int(self.hits[row]),
        )


def place(
    prefills: PrefillPool,
    decodes: DecodePool,
    links: Links,
    request: Placing,
    settings: PlacementSettings = PlacementSettings(),
) -> Decision:
    """Choose a pair.

    Raises:
        ValueError: There is none.
    """
    if not prefills.names or not decodes.names:
        raise ValueError("no pair of workers to choose from")
    if _native is not None and settings.shortlist <= _native.MAX_SHORTLIST:
        pairs = _weigh_natively(_native, prefills, decodes, links, request, settings)
    else:
        pairs = _weigh(prefills, decodes, links, request, settings)
    row, column = _pick(pairs, request, settings)
    return Decision(pairs.candidate(row, column), int(pairs.compute[row]), pairs)


def _weigh(
    prefills: PrefillPool, decodes: DecodePool, links: Links, request: Placing, settings: PlacementSettings
) -> _Pairs:
    """Costs of the pairs worth looking at: what ``pair_costs.c`` computes, too, to the same bits."""
    compute, soonest_s, hits = _prefill_times(prefills, request, settings)
    ready_s = prefills.ahead_tokens / prefills.tokens_per_s + soonest_s + prefills.trouble_s
    prefill_others = settings.prefill_crowd * (compute / prefills.tokens_per_s) / request.ttft_target_s
    tpot_s, decode_cost = _decode_costs(decodes, request, settings)

    few_p = _best(_late(ready_s, request.ttft_target_s, settings) + prefill_others, settings.shortlist)
    few_d = _shortlist_decodes(decodes, decode_cost, prefills.machines.take(few_p), settings)
    transfer_s = _transfer_s(prefills, decodes, links, request, few_p, few_d)
    first_s = decodes.step_s.take(few_d) + decodes.trouble_s.take(few_d)
    seen_s = ready_s.take(few_p)[:, None] + transfer_s + first_s[None, :]
    counted_s = seen_s if settings.use_transfer else seen_s - transfer_s
    costs = _late(counted_s, request.ttft_target_s, settings)
    costs += prefill_others.take(few_p)[:, None] + decode_cost.take(few_d)[None, :]
    return _Pairs(
        [prefills.names[index] for index in few_p.tolist()],
        [decodes.names[index] for index in few_d.tolist()],
        costs,
        seen_s,
        tpot_s.take(few_d),
        hits.take(few_p),
        compute.take(few_p),
    )


def _weigh_natively(
    native: ModuleType,
    prefills: PrefillPool,
    decodes: DecodePool,
    links: Links,
    request: Placing,
    settings: PlacementSettings,
) -> _Pairs:
    tiers = len(prefills.hit_tokens) if settings.tier_weights else 1
    mean, high = _lengths(request, settings)
    found = native.weigh(
        (
            *(prefills.machines, prefills.ahead_tokens, prefills.tokens_per_s),
            *(prefills.hit_tokens[:tiers], prefills.fetch_bytes_per_s[:tiers], prefills.trouble_s),
        ),
        (
            *(decodes.machines, decodes.running, decodes.held_tokens, decodes.remaining_tokens),
            *(decodes.total_tokens, decodes.step_s, decodes.request_s, decodes.token_s),
            *(decodes.hit_tokens, decodes.trouble_s),
        ),
        tiers,
        settings.shortlist,
        (
            *(request.prompt_tokens, request.rerun_tokens, request.bytes_per_token),
            *(request.ttft_target_s, request.tpot_target_s, mean, high),
            *(settings.prefill_crowd, settings.decode_crowd),
            *(settings.foresight if settings.use_lengths else 0.0, settings.miss, settings.overflow),
            *(links.same_machine_bytes_per_s, links.other_machine_bytes_per_s),
            *(links.latency_s, links.other_latency_s, links.fixed_bytes, settings.use_transfer),
        ),
    )
    rows, columns = found[:2]
    costs, ttft_s, tpot_s, hits, compute = map(np.frombuffer, found[2:])
    return _Pairs(
        [prefills.names[index] for index in rows],
        [decodes.names[index] for index in columns],
        costs.reshape(len(rows), -1),
        ttft_s.reshape(len(rows), -1),
        tpot_s,
        hits,
        compute,
    )


def _lengths(request: Placing, settings: PlacementSettings) -> tuple[float, float]:
    """Output that is expected, and that pages should suffice for."""
    if settings.use_lengths:
        return request.forecast.mean, request.forecast.high
    return _BLIND_TOKENS, _BLIND_TOKENS


def _prefill_times(
    pool: PrefillPool, request: Placing, settings: PlacementSettings
) -> tuple[Floats, Floats, Floats]:
    """Tokens to compute, seconds for fetching and computing, and hit length of each worker, by its best tier."""
    prompt = float(request.prompt_tokens)
    hits = np.minimum(pool.hit_tokens, prompt - 1)
    compute = prompt - hits
    if request.rerun_tokens:
        compute = np.where(hits > request.rerun_tokens, compute + request.rerun_tokens, prompt)
    seconds = compute / pool.tokens_per_s
    if not settings.tier_weights:
        return compute[0], seconds[0], hits[0]
    fetched = hits[1:] - hits[:-1]
    token_s = request.bytes_per_token / pool.fetch_bytes_per_s[1:]
    fetched *= token_s if token_s.ndim == 2 else token_s[:, None]
    best, fetch_s = (compute[0], seconds[0], hits[0]), 0.0
    for tier, more_s in enumerate(fetched, start=1):
        fetch_s = fetch_s + more_s
        sooner = seconds[tier] + fetch_s < best[1]  # the nearer tier on a tie
        if sooner.any():
            best = (
                np.where(sooner, compute[tier], best[0]),
                np.where(sooner, seconds[tier] + fetch_s, best[1]),
                np.where(sooner, hits[tier], best[2]),
            )
    return best


def _decode_costs(pool: DecodePool, request: Placing, settings: PlacementSettings) -> tuple[Floats, Floats]:
    """Seconds per token with the request there, and the whole cost of decoding there."""
    mean, high = _lengths(request, settings)
    context = request.prompt_tokens + mean / 2
    slower_s = pool.request_s + pool.token_s * context
    now_s = pool.step_s + pool.request_s * pool.running + pool.token_s * pool.held_tokens + slower_s
    # Requests that end soon make room: over this one's life so many of them are there on average
    company = np.minimum(pool.running, pool.remaining_tokens / mean)
    fewer = settings.foresight * (pool.running - company) if settings.use_lengths else 0.0
    life_s = now_s - pool.request_s * fewer
    others = settings.decode_crowd * slower_s * (pool.running - fewer) / request.tpot_target_s
    peak = pool.held_tokens + pool.remaining_tokens + request.prompt_tokens + high
    fullness = peak / pool.total_tokens
    overflow = settings.overflow * np.where(fullness > 1, fullness, 0.0)
    return now_s, _late(life_s, request.tpot_target_s, settings) + others + overflow


def _late(seconds: Floats, target_s: float, settings: PlacementSettings) -> Floats:
    share = seconds / target_s
    excess = np.maximum(0.0, share - 1)
    excess *= settings.miss
    excess += share
    return excess


def _best(costs: Floats, count: int) -> Indices:
    """Indices of the smallest costs, in order; the first name wins a tie."""
    if len(costs) > 4 * count:
        # All that tie with the last one must be sorted too, or names would not decide
        limit = np.partition(costs, count - 1)[count - 1]
        few = (costs <= limit).nonzero()[0]
        order: Indices = few[costs.take(few).argsort(kind="stable")[:count]]
        return order
    return np.argsort(costs, kind="stable")[:count]


def _shortlist_decodes(
    pool: DecodePool, costs: Floats, machines: Indices, settings: PlacementSettings
) -> Indices:
    """The best of all, and the best on the machine of each prefill worker in question."""
    if len(costs) <= settings.shortlist:
        return np.arange(len(costs))
    chosen = _best(costs, settings.shortlist)
    wanted = np.zeros(int(max(machines.max(), pool.machines.max())) + 1, dtype=np.bool_)
    wanted[machines] = True
    near = wanted.take(pool.machines).nonzero()[0]
    near = near[costs.take(near).argsort(kind="stable")]
    first: dict[int, int] = {}
    for machine, worker in zip(pool.machines.take(near).tolist(), near.tolist(), strict=True):
        first.setdefault(machine, worker)
    return np.array(sorted({*chosen.tolist(), *first.values()}), dtype=np.int64)


def _transfer_s(
    prefills: PrefillPool,
    decodes: DecodePool,
    links: Links,
    request: Placing,
    few_p: Indices,
    few_d: Indices,
) -> Floats:
    missing = (
        np.maximum(0.0, request.prompt_tokens - decodes.hit_tokens.take(few_d)) * request.bytes_per_token
    )
    same = prefills.machines.take(few_p)[:, None] == decodes.machines.take(few_d)[None, :]
    speed = np.where(same, links.same_machine_bytes_per_s, links.other_machine_bytes_per_s)
    latency_s = np.where(same, links.latency_s, links.other_latency_s)
    return np.asarray(latency_s + (missing[None, :] + links.fixed_bytes) / speed, dtype=np.float64)


def _pick(pairs: _Pairs, request: Placing, settings: PlacementSettings) -> tuple[int, int]:
    """The cheapest pair; among those as good as it, the one that the hashes take."""
    slack = min(settings.max_slack, settings.slack_per_s * request.staleness_s)
    best = int(pairs.costs.argmin())
    width = len(pairs.columns)
    near = pairs.costs <= pairs.costs.item(best) + slack
    if np.count_nonzero(near) == 1:
        return divmod(best, width)

    def rank(name: str, seed: bytes) -> tuple[int, str]:
        if slack <= 0:
            return 0, name
        # A CRC alone is linear: of some names one would never come first
        return crc32(name.encode(), crc32(seed)) * _MIX & 0xFFFFFFFF, name

    own = request.request_id.encode()
    prefix = request.affinity or own
    rows = np.flatnonzero(near.any(axis=1)).tolist()
    row = rows[0] if len(rows) == 1 else min(rows, key=lambda at: rank(pairs.rows[at], prefix))
    columns = np.flatnonzero(near[row]).tolist()
    column = columns[0] if len(columns) == 1 else min(columns, key=lambda at: rank(pairs.columns[at], own))
    return int(row), int(column)
