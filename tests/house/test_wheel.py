"""The wheel holds the packages under their names, and its command runs without the repository."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.repository import PACKAGE_ROOTS, ROOT, files

pytestmark = pytest.mark.needs("git")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build folder left in the tree would bring old files along."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for file in files():
        if file.parts[0] in {*PACKAGE_ROOTS, "pyproject.toml", "README.md", "LICENSE"}:
            (source / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, source / file)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
    ]
    run = subprocess.run([*pip, "-w", out, source], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    return next(out.glob("*.whl"))


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        f"epdserve/{file}" for file in files() if file.suffix == ".py" and file.parts[0] in PACKAGE_ROOTS
    }
    assert {name for name in names if name.endswith(".py")} == modules
    weights = {f"epdserve/{file}" for file in files() if file.suffix == ".safetensors"}
    assert {name for name in weights if name.startswith("epdserve/model/")} <= names
    assert {f"epdserve/{root}/py.typed" for root in PACKAGE_ROOTS} <= names
    assert all(name.startswith(("epdserve/", "epdserve-")) for name in names)


def test_the_command_runs_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = f"""
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
sys.path.insert(0, {str(tmp_path)!r})
sys.argv = ["epdserve", "--version"]
from epdserve.services.cli import __main__ as cli
assert cli.__file__.startswith({str(tmp_path)!r}), cli.__file__
cli.main()
"""
    run = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stdout.startswith("epdserve "), run.stderr
