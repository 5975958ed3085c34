"""The import contracts of pyproject.toml hold."""

import subprocess
import sys
from pathlib import Path

from support.repository import ROOT


def test_import_contracts_hold() -> None:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
