"""Drives that fill up and drives that are slow, for real. Needs root; a slow one also cgroups that throttle devices."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_COMMAND_S: Final = 10.0
_CHUNK: Final = 1 << 20
_FILLER: Final = "filler"
_CGROUP_V1: Final = Path("/sys/fs/cgroup/blkio")
_CGROUP_V2: Final = Path("/sys/fs/cgroup")


@contextmanager
def small_drive(folder: Path, *, nbytes: int) -> Iterator[Path]:
    """A file system of so many bytes at a folder, gone when the block ends.

    Raises:
        RuntimeError: It cannot be mounted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=700", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        _run("umount", "-l", str(folder))


def fill(folder: Path) -> int:
    """Take every byte that is left; how many that were."""
    taken = 0
    with (folder / _FILLER).open("wb", buffering=0) as file:
        for size in (_CHUNK, 4096, 1):
            try:
                while True:
                    taken += file.write(bytes(size))
            except OSError:
                continue  # no room for so much: try less
    return taken


def empty(folder: Path) -> None:
    """Give them back."""
    (folder / _FILLER).unlink(missing_ok=True)


@contextmanager
def throttle(pid: int, folder: Path, *, bytes_per_s: int) -> Iterator[None]:
    """A process may move so many bytes a second to and from the device under a folder, until the block ends.

    Raises:
        RuntimeError: The kernel does not let us.
    """
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    name = f"epdserve-chaos-{os.getpid()}"
    try:
        if (_CGROUP_V1 / "cgroup.procs").exists():
            group, home = _CGROUP_V1 / name, _CGROUP_V1
            group.mkdir()
            for way in ("read", "write"):
                (group / f"blkio.throttle.{way}_bps_device").write_text(f"{number} {bytes_per_s}")
        else:
            group, home = _CGROUP_V2 / name, _CGROUP_V2
            group.mkdir()
            (group / "io.max").write_text(f"{number} rbps={bytes_per_s} wbps={bytes_per_s}")
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        raise RuntimeError(f"devices cannot be throttled here: {error}") from None
    try:
        yield
    finally:
        for one in (group / "cgroup.procs").read_text().split():
            (home / "cgroup.procs").write_text(one)
        group.rmdir()


def _run(*words: str) -> None:
    try:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=_COMMAND_S)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"{' '.join(words)}: {getattr(error, 'stderr', '') or error}") from None
