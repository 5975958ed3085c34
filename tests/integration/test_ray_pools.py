"""The pools as a RayCluster runs them: a Ray that was there before, nodes that name roles, one supervisor."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from epdserve.model.demo.writer import write_demo_model
from epdserve.services.cli.up import free_port
from support.valkey import url_of, valkey_server

pytestmark = pytest.mark.slow  # pytest -m slow tests/integration/test_ray_pools.py

START_TIMEOUT_S = 150.0
RESOURCES = '{"epdserve_prefill": 1, "epdserve_decode": 1}'


@pytest.fixture(scope="module")
def router_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port, gcs = tmp_path_factory.mktemp("ray"), free_port(), free_port()
    model_dir = write_demo_model(folder / "demo-model")
    (folder / "token").write_text("0123456789abcdef0123456789abcdef")
    with ExitStack() as exits:
        scratch = exits.enter_context(tempfile.TemporaryDirectory(prefix="epd-ray-"))
        registry = url_of(exits.enter_context(valkey_server()))
        common = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        common |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": (folder / "token").read_text()}
        cluster = {
            "EPDSERVE_MODEL": str(model_dir),
            "EPDSERVE_REGISTRY": registry,
            "EPDSERVE_TOKEN_FILE": str(folder / "token"),
        }
        place = {"EPDSERVE_HOST": "127.0.0.1", "EPDSERVE_MACHINE": "node-a"}
        ray = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=2"]
        ray += [
            "--node-ip-address=127.0.0.1",
            f"--port={gcs}",
            f"--resources={RESOURCES}",
            f"--temp-dir={scratch}",
        ]
        start(exits, [*ray, "--include-dashboard=false"], {**common, **place}, folder / "ray.log")
        ours = [sys.executable, "-P", "-m", "epdserve.services.cli"]
        pools = [*ours, "pools", "--ray-address", f"127.0.0.1:{gcs}"]
        time.sleep(10)
        supervisor = start(exits, pools, {**common, **cluster}, folder / "pools.log")
        start(exits, [*ours, "router", "--port", str(port)], cluster, folder / "router.log")
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while not ready(f"http://127.0.0.1:{port}"):
            assert supervisor.poll() is None, (folder / "pools.log").read_text()
            assert time.monotonic() < give_up_at, (folder / "pools.log").read_text()
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
        supervisor.terminate()
        assert supervisor.wait(60) == 0, (folder / "pools.log").read_text()


def start(exits: ExitStack, command: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as sink:
        process = subprocess.Popen(command, env={**os.environ, **env}, stdout=sink, stderr=subprocess.STDOUT)

    def end() -> None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    exits.callback(end)
    return process


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=2, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def test_workers_that_ray_placed_answer(router_url: str) -> None:
    body = {"model": "deepseek-flash", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    answer = httpx.post(f"{router_url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
