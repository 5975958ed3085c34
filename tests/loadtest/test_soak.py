"""What a soak would find; the soak itself is a command."""

import json
import os
from pathlib import Path

from epdserve.loadtest.client import Outcome
from epdserve.loadtest.soak import Report, Soak
from epdserve.loadtest.soak_vitals import History, Vitals, early_and_late, processes


def history(rss: list[int], descriptors: list[int]) -> History:
    moments = [Vitals(float(at), 1, *pair) for at, pair in enumerate(zip(rss, descriptors, strict=True))]
    return History({"decode-0": moments}, [1 << 20] * len(rss))


def test_the_first_quarter_warms_up() -> None:
    assert early_and_late([100, 100, 1, 1, 5, 5, 2, 2]) == (1, 2)
    assert early_and_late([7]) == (7, 7)


def test_growth_is_found_and_noise_is_not() -> None:
    flat = [300 << 20, 310 << 20, 305 << 20, 309 << 20] * 4
    assert history(flat, [40] * 16).problems() == []
    leak = [(300 << 20) + at * (16 << 20) for at in range(16)]
    assert any("rss" in problem for problem in history(leak, [40] * 16).problems())
    assert any(
        "descriptors" in problem for problem in history(flat, [40 + 9 * at for at in range(16)]).problems()
    )
    missing = history(flat, [40] * 16)
    missing.missing["epdserve_kvstore_pages_missing"] = 1
    assert missing.problems() == ["epdserve_kvstore_pages_missing was 1"]


def test_processes_are_those_that_run_now(tmp_path: Path) -> None:
    state = {
        "processes": {"router": os.getpid()},
        "workers": [
            {"worker": "decode-0", "pid": os.getpid(), "running": True},
            {"worker": "decode-1", "pid": 1 << 30, "running": True},
            {"worker": "store-0", "pid": 5, "running": False},
        ],
    }
    file = tmp_path / "state.json"
    file.write_text(json.dumps(state))
    assert set(processes(file)) == {"router", "decode-0", "decode-1"}
    seen = History()
    seen.look(file)
    assert set(seen.by_name) == {"router", "decode-0"}  # the other one has just died
    assert seen.by_name["router"][0].rss_bytes > 1 << 20


def test_only_the_reference_is_right_and_silence_is_no_answer() -> None:
    soak = Soak(Path("state.json"), {"url": "http://127.0.0.1:1"}, [{}], seed=0)
    soak._reference = ["yes"]
    for outcome in (
        Outcome(0.0, text="yes", finish_reason="length"),
        Outcome(0.0, text="no", finish_reason="length"),
        Outcome(0.0, error="503: b'...'"),
        Outcome(0.0, text="ye", error="worker lost"),
        Outcome(0.0, text="ye"),
    ):
        soak._judge(0, outcome)
    report: Report = soak._report
    report.history = history([1 << 20], [1])
    assert dict(report.outcomes) == {"whole": 2, "refused": 1, "ended with an error": 1}
    assert len(report.wrong) == len(report.broken) == 1
    assert len(report.problems()) == 2
