"""The files of this repository, as tests of the house rules see them."""

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_ROOTS = ("kernels", "model", "kvstore", "services", "loadtest")


@cache
def files() -> tuple[Path, ...]:
    """All files that git tracks or would track, relative to the root, sorted; symbolic links left out."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, check=True, timeout=30).stdout.decode().split("\0")
    return tuple(sorted({Path(name) for name in names if name and (ROOT / name).is_file()}))


def python_files() -> tuple[Path, ...]:
    """Hand-written Python: generated protobuf modules are left out."""
    return tuple(file for file in files() if file.suffix == ".py" and file.parent.name != "pb")


def text_files() -> tuple[Path, ...]:
    """Files that people write: everything but data, generated code and the licence."""
    data = {".safetensors", ".gz", ".png", ".json"}
    return tuple(
        file
        for file in files()
        if file.suffix not in data and file.parent.name != "pb" and file.name != "LICENSE"
    )
