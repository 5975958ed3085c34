"""The shell scripts parse, and their refusals are one clear line."""

import os
import stat
import subprocess
from pathlib import Path

import pytest
from support.repository import ROOT

SCRIPTS = ("deploy/up.sh", "deploy/test.sh", "deploy/environment.sh", "deploy/tools.sh", ".ci/run")


def bash(program: str, *, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", f'set -euo pipefail; source "{ROOT}/deploy/environment.sh"; {program}']
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False
    )


def stub(folder: Path, name: str, program: str) -> None:
    """A program of that name in ``folder``."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n{program}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse(script: str) -> None:
    run = subprocess.run(
        ["bash", "-n", ROOT / script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_the_interpreter_that_is_named_is_taken() -> None:
    assert bash("find_python").stdout.startswith("python3")


def test_an_interpreter_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    for name in ("python3", "python3.13", "python3.12", "python3.11"):
        stub(tmp_path, name, "exit 1")
    run = bash("find_python", PATH=f"{tmp_path}:/usr/bin:/bin", PYTHON="python3")
    assert run.returncode == 1
    assert "no Python 3.11 to 3.13 found" in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_a_python_without_venv_says_what_to_install(tmp_path: Path) -> None:
    stub(tmp_path, "python3", 'case "$2" in *venv*) exit 1;; esac')
    run = bash("find_python", PATH=f"{tmp_path}:/usr/bin:/bin", PYTHON="python3")
    assert run.returncode == 1
    assert "apt-get install python3-venv" in run.stderr


def test_a_full_disk_and_a_foreign_machine_are_refused(tmp_path: Path) -> None:
    stub(tmp_path, "df", "echo Avail; echo 1024")
    run = bash("check_machine", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert run.returncode == 1
    assert "GiB of disk" in run.stderr
    stub(tmp_path, "uname", "echo Darwin")
    run = bash("check_machine", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert run.returncode == 1
    assert "needs Linux on x86_64" in run.stderr


def test_a_stamp_is_good_for_the_same_inputs_in_the_same_folder_only(tmp_path: Path) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    stub(tmp_path / ".venv" / "bin", "python", "")
    (tmp_path / "pins").write_text("a==1\n")
    stamp = 'printf %s "$(fingerprint python3 pins)"'
    assert bash(f"{stamp} > .venv/stamp-run", cwd=tmp_path).returncode == 0
    current = 'is_current run "$(fingerprint python3 pins)"'
    assert bash(current, cwd=tmp_path).returncode == 0
    (tmp_path / "pins").write_text("a==2\n")
    assert bash(current, cwd=tmp_path).returncode == 1
    moved = tmp_path.with_name(tmp_path.name + "-moved")
    tmp_path.rename(moved)
    (moved / "pins").write_text("a==1\n")
    assert bash(current, cwd=moved).returncode == 1
