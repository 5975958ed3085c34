"""The GPU script: every case and layer once, tiny, in Triton's interpreter; and what becomes of a process that ends."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from epdserve.kernels.catalogue import entries
from epdserve.loadtest import gpu_check
from epdserve.loadtest.gpu.report import Report


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one run wrote."""
    output = tmp_path_factory.mktemp("gpu") / "rows.json"
    command = [sys.executable, "-m", "epdserve.loadtest.gpu_check", "--dry-run", "--json", str(output)]
    run = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return dict(json.loads(output.read_text()))


def test_every_case_and_every_layer_is_right(dry_run: dict[str, Any]) -> None:
    rows = dry_run["rows"]
    assert not [row for row in rows if row["verdict"] not in ("ok", "")]
    names = " ".join(row["what"] for row in rows)
    for part in ("linear FP8", "experts w1, w3", "index scores", "sparse attention", "40 layers", "replay"):
        assert part in names


def test_every_kernel_of_the_catalogue_is_launched(dry_run: dict[str, Any]) -> None:
    assert {entry.kernel.fn.__name__ for entry in entries()} <= set(dry_run["kernels"])


_PROCESS = """
import json, sys, time
order = json.loads(sys.argv[1])
def say(**what): print(json.dumps(what), flush=True)
def row(name): say(row={"what": name, "verdict": "ok"})
say(device="a device"); say(ceilings=order["ceilings"] or [1.0, 2.0])
for number, name in enumerate(("first", "dies", "third", "hangs", "lost", "last")):
    if number < order["skip"]: continue
    say(unit=number, name=name)
    if name == "dies": print("a fault", file=sys.stderr); sys.exit(-11)
    if name == "hangs": time.sleep(60)
    if name == "lost": say(row={"what": name, "verdict": "FAILED: illegal address"}); sys.exit(3)
    row(name)
"""


def test_units_behind_one_that_dies_hangs_or_loses_the_device_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "process.py"
    script.write_text(_PROCESS)
    started: list[dict[str, Any]] = []
    real = subprocess.Popen

    def other(command: list[str], **kwargs: Any) -> Any:
        started.append(json.loads(command[-1]))
        return real([sys.executable, str(script), command[-1]], **kwargs)

    monkeypatch.setattr(subprocess, "Popen", other)
    report = Report(tmp_path / "rows.json")
    gpu_check.run_all({"device": "cpu"}, report, limit_s=2.0)
    verdicts = {row.what: row.verdict for row in report.rows}
    assert list(verdicts) == ["first", "dies", "third", "hangs", "lost", "last"]
    assert [verdicts[name] for name in ("first", "third", "last")] == ["ok"] * 3
    assert "a fault" in verdicts["dies"]
    assert verdicts["hangs"] == "FAILED: nothing said for 2 s"
    assert verdicts["lost"] == "FAILED: illegal address"
    assert [order["skip"] for order in started] == [0, 2, 4, 5]
    assert started[0]["ceilings"] is None
    assert started[-1]["ceilings"] == [1.0, 2.0]
    assert report.failed
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 6


def test_whatever_runs_when_time_is_up_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen
    program = 'import time; print("{\\"unit\\": 0, \\"name\\": \\"long\\"}", flush=True); time.sleep(60)'
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **kwargs: real([sys.executable, "-c", program], **kwargs)
    )
    report = Report(None)
    gpu_check.run_all({"device": "cpu"}, report, limit_s=60.0, until=time.monotonic() + 1.0)
    assert [(row.what, row.verdict) for row in report.rows] == [("long", "FAILED: time is up")]


def test_a_process_that_cannot_begin_is_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    report = Report(None)
    gpu_check.run_all({"device": "cpu"}, report, limit_s=5.0)
    assert [row.what for row in report.rows] == ["start"]
    assert report.failed


_BARE = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"typer", "pydantic", "safetensors", "tokenizers", "grpc", "ray", "redis", "nixl"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import epdserve.loadtest.gpu_check, epdserve.loadtest.gpu.work
"""


def test_kernels_and_layers_need_torch_and_triton_alone() -> None:
    run = subprocess.run([sys.executable, "-c", _BARE], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
