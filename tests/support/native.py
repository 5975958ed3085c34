"""Native modules compiled for a test from the source that is tested, whatever was installed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

HEADERS = Path(sysconfig.get_path("include"))


def compiler() -> str | None:
    """The C compiler that makes modules of Python here; None = nothing is compiled on this machine."""
    return (shutil.which("gcc") or shutil.which("cc")) if (HEADERS / "Python.h").is_file() else None


def compiled(source: Path, name: str, folder: Path, *flags: str) -> ModuleType:
    """The module ``name`` of a C file; skips the test where nothing compiles."""
    if (command := compiler()) is None:
        pytest.skip(
            "nothing compiles here, so nothing compiled runs: numpy does the work, and has its own tests"
        )
    library = folder / f"{name}.abi3.so"
    arguments = ("-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *flags, f"-I{HEADERS}")
    subprocess.run([command, *arguments, str(source), "-o", str(library)], check=True, timeout=60)
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
