"""Tests that need a program which is absent are named as not run; --all makes that a failure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.repository import ROOT

FILE = """
import pytest

@pytest.mark.needs("no-such-program")
def test_that_needs_it() -> None:
    raise AssertionError

def test_that_needs_nothing() -> None:
    pass
"""


@pytest.mark.parametrize(("arguments", "status"), [((), 0), (("--all",), 1)], ids=["default", "all"])
def test_what_needs_an_absent_program(tmp_path: Path, arguments: tuple[str, ...], status: int) -> None:
    (tmp_path / "test_it.py").write_text(FILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    needs(program): as ours\n")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", *arguments, str(tmp_path)]
    # Other plug-ins take seconds to import and have no part in it
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert "not run: 1 tests, this machine has no no-such-program" in run.stdout, run.stdout + run.stderr
    assert "1 passed, 1 skipped" in run.stdout
    assert run.returncode == status
