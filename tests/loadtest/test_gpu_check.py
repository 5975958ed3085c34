"""The GPU script's dry run: every case and layer once, tiny, in Triton's interpreter, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_the_dry_run_checks_every_kernel_and_layer(tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    command = [sys.executable, "-m", "epdserve.loadtest.gpu_check", "--dry-run", "--json", str(output)]
    run = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(output.read_text())["rows"]
    assert not [row for row in rows if row["verdict"] not in ("ok", "")]
    names = " ".join(row["what"] for row in rows)
    for part in (
        "linear FP8",
        "experts w1, w3",
        "index scores",
        "top entries",
        "sparse attention",
        "pack window",
        "mhc advance",
        "engram hash",
        "verify drafts",
        "40 layers",
        "replay",
    ):
        assert part in names
