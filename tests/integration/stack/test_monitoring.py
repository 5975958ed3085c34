"""A real Prometheus reads the real server under load: panels have data, rules run, metrics have rows."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import promql_parser
import pytest
import yaml
from epdserve.services.cli.up import free_port
from support.prometheus import Prometheus, running_prometheus
from support.repository import ROOT
from support.stack import Stack

pytestmark = [pytest.mark.needs("prometheus"), pytest.mark.needs("prometheus-node-exporter")]

BOARDS = sorted((ROOT / "helm/epdserve/files/dashboards").glob("*.json"))
RULES = sorted((ROOT / "helm/epdserve/files/rules").glob("*.yaml"))
LOAD_S = 9.0


@pytest.fixture(scope="module")
def prometheus(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus and the machine's exporter beside the server, which has had some seconds of load."""
    folder, node = tmp_path_factory.mktemp("prometheus"), f"127.0.0.1:{free_port()}"
    exporter = subprocess.Popen(
        ["prometheus-node-exporter", f"--web.listen-address={node}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    workers = [worker["metrics_address"] for worker in stack.state()["workers"]]
    targets = {"epdserve": [stack.base_url.removeprefix("http://"), *workers], "node": [node]}
    try:
        with running_prometheus(folder, targets, RULES) as server:
            load(stack)
            time.sleep(1.5)  # the last scrape
            yield server
    finally:
        exporter.terminate()
        exporter.wait(10)


def load(stack: Stack) -> None:
    """Short and long prompts, the same ones again, thinking at several efforts, streams, a grammar, mistakes."""
    until, numbers, lock = time.monotonic() + LOAD_S, iter(range(10_000)), threading.Lock()

    def client() -> None:
        while time.monotonic() < until:
            with lock:
                number = next(numbers)
            fields: dict[str, object] = {"max_tokens": 6}
            if number % 4 == 1:
                fields |= {"thinking": {"type": "enabled"}, "reasoning_effort": (20, 50, 90)[number % 3]}
            elif number % 4 == 2:
                fields |= {"response_format": {"type": "json_object"}}
            elif number % 8 == 3:
                fields |= {"temperature": "hot"}
            stack.chat(f"Tell me about {number % 5}. " + "A long story. " * 30 * (number % 3), **fields)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(client) for _ in range(4)]:
            done.result()


def test_every_panel_parses_and_returns_data(prometheus: Prometheus) -> None:
    empty, seen = [], 0
    for board in BOARDS:
        for panel in json.loads(board.read_text())["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$__rate_interval", "10s").replace("$__range", "10s")
                promql_parser.parse(query)
                assert "$" not in query
                seen += 1
                if not prometheus.query(query):
                    empty.append(f"{board.stem} / {panel['title']}: {query}")
    assert seen > 100
    assert empty == []


def test_every_rule_is_evaluated_without_an_error(prometheus: Prometheus) -> None:
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    written = [
        rule
        for file in RULES
        for group in yaml.safe_load(file.read_text())["groups"]
        for rule in group["rules"]
    ]
    assert len(rules) == len(written)
    assert [rule["name"] for rule in rules if rule.get("lastError")] == []


def test_rules_name_only_metrics_that_there_are(prometheus: Prometheus) -> None:
    known = set(prometheus.get("label/__name__/values"))
    known |= {"epdserve_router_tls_cert_expiry_timestamp_seconds"}  # with TLS only
    named: set[str] = set()
    for file in RULES:
        for group in yaml.safe_load(file.read_text())["groups"]:
            for rule in group["rules"]:
                named |= set(re.findall(r"\b(?:epdserve|process)_[a-z0-9_]+", rule["expr"]))
    table = (ROOT / "deploy/README.md").read_text()
    assert {name for name in named if name not in known and f"`{name}`" not in table} == set()


def test_every_metric_of_the_running_server_is_in_the_reference(stack: Stack) -> None:
    rows = re.findall(
        r"^\| `(epdserve_\w+)` \| (\w+) \|", (ROOT / "deploy/README.md").read_text(), re.MULTILINE
    )
    addresses = [
        stack.base_url,
        *(f"http://{worker['metrics_address']}" for worker in stack.state()["workers"]),
    ]
    exported: set[tuple[str, str]] = set()
    for address in addresses:
        text = httpx.get(f"{address}/metrics", timeout=10, trust_env=False).text
        exported |= set(re.findall(r"^# TYPE (epdserve_\w+?(?<!_created)) (\w+)$", text, re.MULTILINE))
    assert len(exported) > 100
    assert exported - set(rows) == set()


def test_promtool_finds_nothing_to_say_about_the_exposition(stack: Stack) -> None:
    text = httpx.get(f"{stack.base_url}/metrics", timeout=10, trust_env=False).text
    ours = "".join(line + "\n" for line in text.splitlines() if "epdserve_" in line)
    run = subprocess.run(
        ["promtool", "check", "metrics"], input=ours, capture_output=True, text=True, timeout=60, check=False
    )
    assert "error while linting" not in run.stderr


def test_every_board_is_one_of_the_five() -> None:
    assert {board.stem for board in BOARDS} == {"overview", "pools", "kv-tiers", "router", "node"}
    assert all(Path(board).stat().st_size < 60_000 for board in BOARDS), "a ConfigMap holds a MiB"
