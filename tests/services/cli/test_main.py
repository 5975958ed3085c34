import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from epdserve.services.cli.demo_model import run as write_demo
from epdserve.services.cli.errors import CommandError
from epdserve.services.cli.logits import read_ids


def epdserve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "epdserve.services.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_version() -> None:
    run = epdserve("--version")
    assert (run.returncode, run.stdout.strip()) == (0, f"epdserve {version('epdserve')}")


def test_the_command_line_starts_without_heavy_libraries() -> None:
    program = """
import sys
import epdserve.services.cli.__main__
import epdserve.services.cli.chat
print([name for name in ("torch", "ray", "grpc", "nixl", "fastapi", "numpy") if name in sys.modules])
"""
    run = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.strip() == "[]"


def test_a_command_that_cannot_go_on_says_one_line(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    run = epdserve("demo-model", str(tmp_path))
    assert run.returncode == 1
    assert run.stderr.startswith("epdserve: ")
    assert len(run.stderr.splitlines()) == 1


def test_a_demo_model_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(CommandError, match="not an empty folder"):
        write_demo(tmp_path)


def test_ids_are_read(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[3, 1, 2]")
    assert read_ids(tmp_path / "ids.json") == [3, 1, 2]


@pytest.mark.parametrize("content", ["", "[]", "{}", "[1.5]", '["1"]', "[true]", "[-1]", "[[1]]"])
def test_what_is_no_list_of_ids_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "ids.json").write_text(content)
    with pytest.raises(CommandError, match=r"ids\.json"):
        read_ids(tmp_path / "ids.json")


def test_doctor_reports_as_a_table_and_a_status() -> None:
    run = epdserve("doctor", "--port", "0")
    assert run.returncode in (0, 1)
    assert "NIXL plug-ins" in run.stdout
    assert "direct I/O" in run.stdout
    assert json.dumps(run.stderr) == '""'
