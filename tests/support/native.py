"""Native modules compiled for a test from the source that is tested, whatever was installed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest


def compiled(source: Path, name: str, folder: Path, *flags: str) -> ModuleType:
    """The module ``name`` of a C file; skips the test where nothing compiles."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    headers = Path(sysconfig.get_path("include"))
    if compiler is None or not (headers / "Python.h").is_file():
        pytest.skip("no C compiler, or no headers of Python")
    library = folder / f"{name}.abi3.so"
    arguments = ("-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *flags, f"-I{headers}")
    subprocess.run([compiler, *arguments, str(source), "-o", str(library)], check=True, timeout=60)
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
