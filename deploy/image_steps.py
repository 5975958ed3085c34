"""Runs the RUN steps of the Dockerfile that need no container: ``python deploy/image_steps.py [STAGE...]``.

Paths of the image become folders of a scratch directory; steps that install Debian packages or make users are named and
left out. By default the wheel is built and the router's environment made from it; it must start, and hold no torch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
NEEDS_A_CONTAINER: Final = ("apt-get", "useradd")


def steps(stage: str) -> list[str]:
    """RUN commands of a stage, without those of the stages it stands on."""
    text = re.sub(r"\\\n", " ", (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8"))
    current, found = "", []
    for line in text.splitlines():
        if match := re.match(r"FROM \S+ AS (\w+)", line):
            current = match[1]
        elif line.startswith("RUN ") and current == stage:
            found.append(line.removeprefix("RUN "))
    return found


def run(stage: str, scratch: Path) -> None:
    """Run what can run.

    Raises:
        SystemExit: A step failed.
    """
    python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for step in steps(stage):
        if any(word in step for word in NEEDS_A_CONTAINER):
            print(f"left out ({stage}): {step}")
            continue
        here = step
        for path in ("/wheels", "/opt/epdserve"):
            here = re.sub(rf"(?<![\w.]){path}", str(scratch / path.lstrip("/")), here)
        print(f"running ({stage}): {step}", flush=True)
        source = scratch / "src"
        if subprocess.run(
            ["bash", "-euc", here], cwd=source, env={**os.environ, "PATH": python}, check=False
        ).returncode:
            raise SystemExit(f"failed: {step}")


def copy_source(scratch: Path) -> None:
    """What the build stage copies, out of git's view of the tree."""
    kept = ("pyproject.toml", "README.md", "LICENSE", "kernels", "model", "kvstore", "services", "loadtest")
    command = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        *kept,
    ]
    listed = subprocess.run(command, capture_output=True, check=True, text=True, timeout=60).stdout
    for name in filter(None, listed.split("\0")):
        target = scratch / "src" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())


def check_router(scratch: Path) -> None:
    """The router's environment starts and is light.

    Raises:
        SystemExit: It does not, or is not.
    """
    folder = scratch / "opt/epdserve/bin"
    subprocess.run(
        [folder / "epdserve", "router", "--help"], check=True, stdout=subprocess.DEVNULL, timeout=120
    )
    program = "import importlib.util as u; print(*[m for m in ('torch', 'ray', 'nixl', 'triton') if u.find_spec(m)])"
    heavy = subprocess.run(
        [folder / "python", "-P", "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    if heavy.stdout.strip():
        raise SystemExit(f"the router's image holds {heavy.stdout.strip()}")
    size = sum(file.stat().st_size for file in (scratch / "opt").rglob("*") if file.is_file())
    print(f"router: starts, no torch, {size / 2**20:.0f} MiB of environment")


def main(stages: list[str]) -> int:
    """Run the stages in order."""
    with tempfile.TemporaryDirectory(prefix="epdserve-image-") as folder:
        scratch = Path(folder)
        copy_source(scratch)
        for stage in stages or ["build", "base", "router"]:
            run(stage, scratch)
            if stage == "router":
                check_router(scratch)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
