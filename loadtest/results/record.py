"""One record a request, and a file of all of them: what figures, plots and comparisons are made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from epdserve.loadtest.client import Outcome

FORMAT: Final = 1
TIERS: Final = ("device", "tail", "host", "ssd", "peer", "computed")


class Ending(StrEnum):
    """How a request ended."""

    OK = "ok"
    LEFT = "left"  # the client went away, as it was to
    REFUSED = "refused"  # 429 or 503: come again
    REJECTED = "rejected"  # another 4xx
    FAILED = "failed"
    CUT = "cut"  # the stream ended without saying why


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Times in seconds from the start of the run, or as durations.

    Attributes:
        late_s: How much later than planned it was sent: the load generator's own lag.
        tpot_s: Mean time between tokens after the first one.
        gaps_ms: Times between events that carried text.
        wanted_prompt, wanted_answer: Tokens asked for, None where they were left open.
        tiers: Prompt tokens by where their KV came from, if the server tells.
        prefill_ms: In which it was computed or fetched, queue excluded, if the server tells.
        expected: It ended as it should: nonsense refused, a client gone.
    """

    kind: str
    tenant: int
    turn: int
    at_s: float
    late_s: float
    ending: Ending
    expected: bool
    status: int
    error: str
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    gaps_ms: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    wanted_prompt: int | None
    wanted_answer: int | None
    tiers: Mapping[str, int] = field(default_factory=dict)
    prefill_ms: float | None = None
    effort_asked: int | None = None
    effort_granted: int | None = None
    resumes: int = 0

    @property
    def ok(self) -> bool:
        """A whole answer."""
        return self.ending is Ending.OK

    @property
    def wrong_length(self) -> bool:
        """Whole, and not as long as it was asked to be."""
        pairs = ((self.wanted_prompt, self.prompt_tokens), (self.wanted_answer, self.completion_tokens))
        return self.ok and any(wanted is not None and wanted != came for wanted, came in pairs)

    def meets(self, slo: Slo) -> bool:
        """Whole and in time."""
        if not self.ok or self.ttft_s is None:
            return False
        return self.ttft_s <= slo.ttft_s and (self.tpot_s is None or self.tpot_s <= slo.tpot_s)


@dataclass(frozen=True, slots=True)
class Slo:
    """What counts as in time."""

    ttft_s: float = 2.0
    tpot_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Results:
    """One run.

    Attributes:
        name: For people.
        settings: What was asked for, as told on the command line.
        elapsed_s: From the first request to the last byte.
    """

    name: str
    started_at: str
    settings: Mapping[str, Any]
    slo: Slo
    elapsed_s: float
    records: tuple[Record, ...]

    def save(self, path: Path) -> None:
        """Write one JSON object.

        Raises:
            OSError: It cannot be written.
        """
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read what ``save`` wrote.

        Raises:
            OSError, ValueError: It cannot be read, or is something else.
        """
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            if table.pop("format") != FORMAT:
                raise ValueError(f"{path} is of another version")
            table["slo"] = Slo(**table["slo"])
            table["records"] = tuple(_record(row) for row in table["records"])
            return cls(**table)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} holds no results of a load test: {error}") from None


def _record(row: dict[str, Any]) -> Record:
    row["gaps_ms"] = tuple(row["gaps_ms"])
    return Record(**{**row, "ending": Ending(row["ending"])})


def ending_of(outcome: Outcome, *, left: bool) -> Ending:
    """How a request ended."""
    if outcome.ok:
        return Ending.OK
    if left:
        return Ending.LEFT
    if outcome.status in (429, 503):
        return Ending.REFUSED
    if 400 <= outcome.status < 500:
        return Ending.REJECTED
    return Ending.CUT if outcome.error is None else Ending.FAILED


def facts_of(outcome: Outcome) -> dict[str, Any]:
    """The fields of a record that the answer tells."""
    receipt, usage = outcome.receipt, outcome.usage
    tokens, effort = receipt.get("tokens") or {}, receipt.get("effort") or {}
    details = usage.get("prompt_tokens_details") or {}
    cached = usage.get("prompt_cache_hit_tokens", details.get("cached_tokens", 0))
    at = outcome.text_at
    return {
        "status": outcome.status,
        "error": (outcome.error or "")[:200],
        "ttft_s": outcome.ttft_s,
        "tpot_s": outcome.itl_s,
        "e2e_s": outcome.ended_at - outcome.sent_at,
        "gaps_ms": tuple(round(1e3 * (b - a), 2) for a, b in pairwise(at)),
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": int(cached or 0),
        "completion_tokens": outcome.completion_tokens,
        "tiers": {name: int(tokens[name]) for name in TIERS if tokens.get(name)},
        "prefill_ms": (receipt.get("ms") or {}).get("prefill"),
        "effort_asked": effort.get("asked"),
        "effort_granted": effort.get("granted"),
        "resumes": int(receipt.get("resumes", 0)),
    }
