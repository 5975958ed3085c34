"""What an operator has of a running server: traces across its processes, and a bundle without secrets."""

import base64
import json
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import httpx
from support.stack import Stack
from support.vision import encoded, picture

TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_one_trace_id_goes_through_router_and_workers(stack: Stack, traces: Path) -> None:
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    body = stack.body("Trace this sentence, please.", max_tokens=4, ignore_eos=True)
    answer = stack.http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == httpx.codes.OK, answer.text
    wanted = {"epdserve-router", "epdserve-prefill", "epdserve-decode"}
    stack.wait_until(lambda: {service for service, _ in spans(traces, TRACE)} >= wanted)
    found = spans(traces, TRACE)
    [call] = [span for _, span in found if span["name"] == "POST /v1/chat/completions"]
    assert call["parentSpanId"] == "b7ad6b7169203331"
    jobs = {span["name"]: span for service, span in found if service != "epdserve-router"}
    assert set(jobs) == {"prefill", "bring up", "decode"}  # the second is what the store gave
    for job in jobs.values():
        assert job["parentSpanId"] == call["spanId"]
        assert call["startTimeUnixNano"] < job["startTimeUnixNano"] < job["endTimeUnixNano"]
    assert int(jobs["prefill"]["endTimeUnixNano"]) <= int(jobs["decode"]["endTimeUnixNano"])
    assert int(jobs["bring up"]["endTimeUnixNano"]) <= int(jobs["prefill"]["endTimeUnixNano"])


def test_embedding_an_image_is_a_span_of_its_request(stack: Stack, traces: Path) -> None:
    trace = TRACE[::-1]
    url = "data:image/png;base64," + base64.b64encode(encoded(picture(60, 50, seed=8))).decode()
    body = stack.body("What is this?", max_tokens=1)
    body["messages"][0]["content"] = [{"type": "image_url", "image_url": {"url": url}}]
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    answer = stack.http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == httpx.codes.OK, answer.text
    stack.wait_until(lambda: "encode" in {span["name"] for _, span in spans(traces, trace)})
    [encode] = [span for _, span in spans(traces, trace) if span["name"] == "encode"]
    told = {item["key"]: item["value"] for item in encode["attributes"]}
    assert told["epdserve.outcome"] == {"stringValue": "ok"}
    assert told["epdserve.images"] == {"intValue": "1"}


def spans(folder: Path, trace: str) -> list[tuple[str, dict[str, Any]]]:
    """Service and span, of one trace."""
    found = []
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            for resource in json.loads(line)["resourceSpans"]:
                names = {a["key"]: a["value"].get("stringValue") for a in resource["resource"]["attributes"]}
                for scope in resource["scopeSpans"]:
                    ours = [span for span in scope["spans"] if span["traceId"] == trace]
                    found += [(str(names["service.name"]), span) for span in ours]
    return found


def test_a_bundle_holds_what_runs_and_no_secret(stack: Stack, tmp_path: Path) -> None:
    out = tmp_path / "help.tar.gz"
    folder = stack.state_file.parent
    command = [sys.executable, "-P", "-m", "epdserve.services.cli", "bundle", "--state-dir", str(folder)]
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, timeout=60, check=True
    )
    assert "secrets removed" in done.stdout
    token = (
        Path(tomllib.loads((folder / "router.toml").read_text())["cluster_token_file"]).read_text().strip()
    )
    with tarfile.open(out) as tar:
        texts = {entry.name: tar.extractfile(entry).read().decode() for entry in tar}  # type: ignore[union-attr]
    assert all(token not in text for text in texts.values())
    assert "epdserve_router_requests_total" in texts["help/answers/router-metrics.txt"]
    for worker in stack.state()["workers"]:
        assert "epdserve_" in texts[f"help/answers/{worker['worker']}-metrics.txt"]
    assert "help/logs/router.log" in texts
