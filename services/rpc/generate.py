"""Generates ``services/rpc/pb`` from ``proto/``: ``python -m epdserve.services.rpc.generate``.

protoc writes absolute imports by proto package (``epdserve.v1``), which is no Python package of ours; they
are rewritten to relative ones. The result is committed; a test generates again and compares.
"""

from __future__ import annotations

import importlib.resources
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

PROTO_ROOT: Final = Path(__file__).resolve().parents[2] / "proto"
PB_DIR: Final = Path(__file__).resolve().parent / "pb"

_PROTO_DIR: Final = "epdserve/v1"
_IMPORT: Final = re.compile(r"^from epdserve\.v1 import (\w+) as (\w+)$", re.MULTILINE)


def generate(out_dir: Path) -> list[str]:
    """Write the generated modules and stubs into a folder.

    Returns:
        Names of the files written.

    Raises:
        RuntimeError: protoc failed; the message is its output.
    """
    protos = sorted(
        path.relative_to(PROTO_ROOT).as_posix() for path in (PROTO_ROOT / _PROTO_DIR).glob("*.proto")
    )
    well_known = str(importlib.resources.files("grpc_tools") / "_proto")
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [f"--{name}_out={scratch}" for name in ("python", "grpc_python", "mypy", "mypy_grpc")]
        # mypy-protobuf's plug-ins stand beside the interpreter, which need not be on PATH
        tools = Path(sys.executable).parent
        plugins = [
            f"--plugin=protoc-gen-{name}={tools / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")
        ]
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO_ROOT}", f"-I{well_known}"]
        done = subprocess.run(
            [*command, *plugins, *outputs, *protos], capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            raise RuntimeError(f"protoc failed: {done.stderr.strip()}")
        written = sorted(path for path in (Path(scratch) / _PROTO_DIR).iterdir() if _wanted(path.name))
        for path in written:
            (out_dir / path.name).write_text(_relative(path.read_text()))
    return [path.name for path in written]


def _wanted(name: str) -> bool:
    return not name.startswith("common_pb2_grpc")  # common.proto has no service


def _relative(text: str) -> str:
    return _IMPORT.sub(r"from . import \1 as \2", text)


if __name__ == "__main__":
    for name in generate(PB_DIR):
        print(name)
