"""What a rolling restart must not show; the restarts themselves are an integration test and a command."""

import json

from epdserve.loadtest.rolling import Report


def test_silence_failures_and_what_is_left_over_are_problems() -> None:
    report = Report(failed=["503"], wrong=["a"], not_back=["router"], left_over={"decode-0": {"leases": 1.0}})
    assert len(report.problems()) == 5  # and no answer was whole
    assert Report(whole=3).problems() == []


def test_a_report_is_json_and_lines() -> None:
    report = Report(whole=2, waits_s=[1.0, 2.0], took_s=[5.0])
    report.restarts["decode-0"] += 1
    assert json.loads(json.dumps(report.as_json()))["restarts"] == {"decode-0": 1}
    assert report.rows()[0] == "1 restarts: {'decode-0': 1}"
