"""Every kernel compiles for the real targets, and no hot one spills without a reason."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from epdserve.kernels.catalogue import MODULES
from support.repository import ROOT


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """One run of the command, in a process without the interpreter."""
    file = tmp_path_factory.mktemp("aot") / "figures.json"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "epdserve.kernels.aot", "--json", str(file)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    ), file


def test_no_hot_kernel_spills_without_a_reason(
    compiled: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    assert compiled[0].returncode == 0, compiled[0].stderr[-4000:]


def test_every_kernel_compiles_for_hopper_and_blackwell(
    compiled: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    figures: dict[str, dict[str, Any]] = json.loads(compiled[1].read_text())
    assert len(figures) >= len(MODULES)
    missing = {name for name, targets in figures.items() if not {"sm_90", "sm_100"} <= set(targets)}
    assert missing == set()


def test_the_table_in_the_repository_is_of_these_kernels(
    compiled: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    written = (ROOT / "kernels/COMPILED.md").read_text()
    printed = [line for line in compiled[0].stdout.splitlines() if line.startswith("|")]
    stale = [line for line in printed if line not in written]
    assert stale == [], "run: python -m epdserve.kernels.aot --markdown kernels/COMPILED.md"
