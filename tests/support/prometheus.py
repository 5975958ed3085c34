"""A real Prometheus on loopback, for tests: what it scrapes, and what it answers."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from epdserve.services.cli.up import free_port

START_TIMEOUT_S = 30.0


class Prometheus:
    """One running server."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=20, trust_env=False)

    def close(self) -> None:
        """Close the connections to it."""
        self._http.close()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Samples of an instant query."""
        answer = self._http.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def get(self, path: str) -> Any:
        """Data of another call of the API."""
        return self._http.get(f"/api/v1/{path}").json()["data"]

    def is_ready(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False


@contextmanager
def running_prometheus(
    folder: Path, targets: Mapping[str, Sequence[str]], rules: Sequence[Path]
) -> Iterator[Prometheus]:
    """Scrape the targets (job -> ``host:port``) each second, and evaluate the rules as often, until the block ends."""
    files = []
    for rule in rules:
        table = yaml.safe_load(rule.read_text())
        for group in table["groups"]:
            group.pop("interval", None)  # a test has not half a minute
        files.append(folder / f"{rule.stem}.json")
        files[-1].write_text(json.dumps(table))
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(file) for file in files],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(each)}]} for job, each in targets.items()
        ],
    }
    file, port = folder / "prometheus.yml", free_port()
    file.write_text(json.dumps(config))
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("wb") as sink:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=sink, stderr=subprocess.STDOUT
        )
    try:
        server, give_up_at = Prometheus(f"http://127.0.0.1:{port}"), time.monotonic() + START_TIMEOUT_S
        while not server.is_ready():
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            assert time.monotonic() < give_up_at, (folder / "prometheus.log").read_text()
            time.sleep(0.05)
        yield server
        server.close()
    finally:
        process.terminate()
        process.wait(20)
