import json
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from epdserve.services.cli.demo_model import run as write_demo
from epdserve.services.cli.errors import CommandError
from epdserve.services.cli.logits import LogitsOptions
from epdserve.services.cli.logits import run as run_logits
from safetensors.numpy import load_file


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


def test_a_package_that_is_missing_is_one_line() -> None:
    program = """
import sys
sys.modules["httpx"] = None  # as if it were not installed
sys.argv = ["epdserve", "chat", "hello"]
from epdserve.services.cli.__main__ import main
main()
"""
    run = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 1
    assert (
        run.stderr == "epdserve: the package httpx is not installed; pip install -r deploy/requirements.txt\n"
    )


def test_a_demo_model_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(CommandError, match="not a demo model"):
        write_demo(tmp_path)


OPTIONS = LogitsOptions(precision="f32", prefill=None, chunk=None, encoder_hit=0, decoder_replay=False)
GOLDEN_MODEL = Path(__file__).parents[2] / "golden" / "tiny"


def test_logits_come_from_ids(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[3, 1, 2]")
    run_logits(GOLDEN_MODEL, tmp_path / "ids.json", tmp_path / "out.safetensors", OPTIONS)
    logits = load_file(tmp_path / "out.safetensors")["logits"]
    assert (logits.shape, logits.dtype) == ((3, 512), np.float32)
    assert np.isfinite(logits).all()


def test_logits_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[3]")
    with pytest.raises(CommandError, match="directory"):
        run_logits(GOLDEN_MODEL, tmp_path / "ids.json", tmp_path, OPTIONS)


@pytest.mark.parametrize("content", ["", "[]", "{}", "[1.5]", '["1"]', "[true]", "[-1]", "[[1]]", "[512]"])
def test_what_is_no_list_of_ids_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "ids.json").write_text(content)
    with pytest.raises(CommandError):
        run_logits(GOLDEN_MODEL, tmp_path / "ids.json", tmp_path / "out.safetensors", OPTIONS)


def test_missing_files_and_unknown_precisions_are_named(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    with pytest.raises(CommandError, match=r"config\.json"):
        run_logits(tmp_path, tmp_path / "ids.json", out, OPTIONS)
    with pytest.raises(CommandError, match=r"ids\.json"):
        run_logits(GOLDEN_MODEL, tmp_path / "ids.json", out, OPTIONS)
    with pytest.raises(CommandError, match="f32, f32q, bf16q, native"):
        run_logits(GOLDEN_MODEL, tmp_path / "ids.json", out, replace(OPTIONS, precision="int4"))


def test_doctor_reports_as_a_table_and_a_status() -> None:
    run = epdserve("doctor", "--port", "0")
    assert run.returncode in (0, 1)
    assert "NIXL plug-ins" in run.stdout
    assert "direct I/O" in run.stdout
    assert json.dumps(run.stderr) == '""'
