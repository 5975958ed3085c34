"""From records to figures: percentiles over all and over time, goodput, hits and their cost by tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from epdserve.loadtest.figures import Spread, percentile
from epdserve.loadtest.results.record import TIERS, Ending, Record, Results, Slo

_WINDOWS: Final = 24


@dataclass(frozen=True, slots=True)
class Prices:
    """Of a million tokens, in any currency; 0 = not told."""

    hit: float = 0.0
    miss: float = 0.0
    answer: float = 0.0

    def of(self, records: Iterable[Record]) -> float:
        """What these requests cost."""
        hit = miss = answer = 0
        for record in records:
            hit += record.cached_tokens
            miss += record.prompt_tokens - record.cached_tokens
            answer += record.completion_tokens
        return (hit * self.hit + miss * self.miss + answer * self.answer) / 1e6


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of some requests.

    Attributes:
        goodput_per_s: Requests a second that were whole and in time.
        in_time_ratio: Of those that were to end whole.
        wrong_lengths: Whole, and not as long as asked for.
        late_ms: The generator's own lag.
    """

    requests: int
    endings: Mapping[str, int]
    unexpected: int
    wrong_lengths: int
    requests_per_s: float
    goodput_per_s: float
    in_time_ratio: float
    answer_tokens_per_s: float
    prompt_tokens: int
    cached_ratio: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    late_ms: Spread | None
    cost: float

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self)


def summarise(records: Sequence[Record], elapsed_s: float, slo: Slo, prices: Prices | None = None) -> Summary:
    """Figures of some records of a run that took ``elapsed_s``."""
    whole = [record for record in records if record.ok]
    good = sum(record.meets(slo) for record in whole)
    meant = [record for record in records if record.ending is not Ending.LEFT and not _nonsense(record)]
    prompt = sum(record.prompt_tokens for record in whole)
    per_s = 1 / elapsed_s if elapsed_s > 0 else 0.0
    return Summary(
        requests=len(records),
        endings=dict(Counter(record.ending.value for record in records)),
        unexpected=sum(not record.expected for record in records),
        wrong_lengths=sum(record.wrong_length for record in whole),
        requests_per_s=len(records) * per_s,
        goodput_per_s=good * per_s,
        in_time_ratio=good / len(meant) if meant else 0.0,
        answer_tokens_per_s=sum(record.completion_tokens for record in whole) * per_s,
        prompt_tokens=prompt,
        cached_ratio=sum(record.cached_tokens for record in whole) / prompt if prompt else 0.0,
        ttft_ms=Spread.of(_ms(record.ttft_s) for record in whole),
        tpot_ms=Spread.of(_ms(record.tpot_s) for record in whole),
        itl_ms=Spread.of(gap for record in whole for gap in record.gaps_ms),
        e2e_ms=Spread.of(_ms(record.e2e_s) for record in whole),
        late_ms=Spread.of(_ms(record.late_s) for record in records),
        cost=(prices or Prices()).of(whole),
    )


def _nonsense(record: Record) -> bool:
    return record.ending is Ending.REJECTED and record.expected


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


@dataclass(frozen=True, slots=True)
class Series:
    """One quantity over time: a percentile for each window in which something was measured."""

    at_s: tuple[float, ...]
    p50: tuple[float, ...]
    p90: tuple[float, ...]
    p99: tuple[float, ...]


def over_time(results: Results, read: Callable[[Record], Iterable[float | None]]) -> Series:
    """Percentiles of whole answers by the window in which they were asked for, all windows as long."""
    width = max(results.elapsed_s, 1e-9) / _WINDOWS
    found: dict[int, list[float]] = {}
    for record in results.records:
        if record.ok:
            window = min(_WINDOWS - 1, int(record.at_s / width))
            found.setdefault(window, []).extend(value for value in read(record) if value is not None)
    rows = [(window, sorted(values)) for window, values in sorted(found.items()) if values]
    return Series(
        tuple(width * (window + 0.5) for window, _ in rows),
        *(tuple(percentile(values, rank) for _, values in rows) for rank in (50, 90, 99)),
    )


def rates_over_time(results: Results) -> tuple[list[float], dict[str, list[float]]]:
    """Requests a second by window: sent, in time, refused and failed."""
    width = max(results.elapsed_s, 1e-9) / _WINDOWS
    names = ("sent", "in time", "refused", "failed")
    counts = {name: [0.0] * _WINDOWS for name in names}
    for record in results.records:
        window = min(_WINDOWS - 1, int(record.at_s / width))
        counts["sent"][window] += 1 / width
        if record.meets(results.slo):
            counts["in time"][window] += 1 / width
        elif record.ending is Ending.REFUSED:
            counts["refused"][window] += 1 / width
        elif not record.expected:
            counts["failed"][window] += 1 / width
    return [width * (at + 0.5) for at in range(_WINDOWS)], counts


@dataclass(frozen=True, slots=True)
class TierRow:
    """Requests whose prompt came from one tier for the most part.

    Attributes:
        tokens: Prompt tokens of all requests that came from this tier.
        prefill_ms_per_token: Median of the prefill's time over the prompt's length.
    """

    tier: str
    tokens: int
    requests: int
    ttft_ms: Spread | None
    prefill_ms_per_token: float | None


def by_tier(records: Sequence[Record]) -> list[TierRow]:
    """Hits and what they cost, by tier; empty where the server does not tell."""
    rows = []
    for tier in TIERS:
        tokens = sum(record.tiers.get(tier, 0) for record in records)
        mostly = [r for r in records if r.ok and r.tiers and max(r.tiers, key=lambda t: r.tiers[t]) == tier]
        each = sorted(r.prefill_ms / r.prompt_tokens for r in mostly if r.prefill_ms and r.prompt_tokens)
        if tokens:
            ttft = Spread.of(_ms(record.ttft_s) for record in mostly)
            rows.append(TierRow(tier, tokens, len(mostly), ttft, percentile(each, 50) if each else None))
    return rows
