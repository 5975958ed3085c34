"""Records and results of load tests, with everything that a test does not care about filled in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from epdserve.loadtest.results.record import Ending, Record, Results, Slo


def record(**changes: Any) -> Record:
    """A whole answer of 8 tokens to a prompt of 100."""
    fields: dict[str, Any] = {
        "kind": "chat",
        "tenant": 0,
        "turn": 0,
        "at_s": 0.0,
        "late_s": 0.0,
        "ending": Ending.OK,
        "expected": True,
        "status": 200,
        "error": "",
        "ttft_s": 0.2,
        "tpot_s": 0.02,
        "e2e_s": 0.4,
        "gaps_ms": (20.0,) * 7,
        "prompt_tokens": 100,
        "cached_tokens": 0,
        "completion_tokens": 8,
        "wanted_prompt": None,
        "wanted_answer": None,
    }
    return Record(**{**fields, **changes})


def results(records: Sequence[Record], *, elapsed_s: float = 10.0, name: str = "run") -> Results:
    """A run of these."""
    return Results(name, "2026-01-01T00:00:00+00:00", {"rate": 1}, Slo(1.0, 0.1), elapsed_s, tuple(records))
