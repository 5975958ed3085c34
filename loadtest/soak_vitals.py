"""Memory, descriptors, disk and pages of a server's processes over a soak, and whether they stayed flat."""

import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from epdserve.loadtest import pools

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_ROOM_BYTES: Final = 48 << 20  # what allocators and caches may take beyond a tenth
_ROOM_RATIO: Final = 0.10
_ROOM_DESCRIPTORS: Final = 16


@dataclass(frozen=True, slots=True)
class Vitals:
    """One process at one moment."""

    at_s: float
    pid: int
    rss_bytes: int
    descriptors: int


@dataclass(slots=True)
class History:
    """All moments of a soak, by process; a restarted worker goes on under its name."""

    by_name: dict[str, list[Vitals]] = field(default_factory=dict)
    disk_bytes: list[int] = field(default_factory=list)
    missing: dict[str, float] = field(default_factory=dict)  # pages and slots in no state: the worst seen

    def look(self, state_file: Path) -> None:
        """Note one moment; what has just died is left out."""
        for name, pid in processes(state_file).items():
            vitals = _vitals(pid)
            if vitals is not None:
                self.by_name.setdefault(name, []).append(vitals)
        self.disk_bytes.append(_disk_bytes(state_file.parent))

    async def count_missing(self, server: Mapping[str, Any], client: httpx.AsyncClient) -> None:
        """Note pages and slots that are in no state."""
        for address in pools.addresses(server).values():
            try:
                samples = await pools.read(client, address)
            except httpx.HTTPError:
                continue  # just killed
            for name in pools.MISSING:
                self.missing[name] = max(self.missing.get(name, 0.0), samples.get(name, 0.0))

    def problems(self) -> list[str]:
        """What grew, or does not add up."""
        found = [f"{name} was {count:g}" for name, count in self.missing.items() if count]
        for name, moments in self.by_name.items():
            for what, values, room in (
                ("rss_bytes", [moment.rss_bytes for moment in moments], _ROOM_BYTES),
                ("descriptors", [moment.descriptors for moment in moments], _ROOM_DESCRIPTORS),
            ):
                early, late = early_and_late(values)
                if late > early * (1 + _ROOM_RATIO) + room:
                    found.append(f"{name}: {what} grew from {early:,.0f} to {late:,.0f}")
        early, late = early_and_late(self.disk_bytes)
        if late > early * (1 + _ROOM_RATIO) + _ROOM_BYTES:
            found.append(f"disk grew from {early:,.0f} to {late:,.0f} bytes")
        return found

    def rows(self) -> list[str]:
        """Early and late medians, one line a process."""
        lines = []
        for name, moments in sorted(self.by_name.items()):
            rss = early_and_late([moment.rss_bytes for moment in moments])
            descriptors = early_and_late([moment.descriptors for moment in moments])
            lives = len({moment.pid for moment in moments})
            lines.append(
                f"{name}: {rss[0] / 2**20:.0f} -> {rss[1] / 2**20:.0f} MiB, "
                f"{descriptors[0]:.0f} -> {descriptors[1]:.0f} descriptors, {lives} lives"
            )
        disk = early_and_late(self.disk_bytes)
        return [*lines, f"disk: {disk[0] / 2**20:.0f} -> {disk[1] / 2**20:.0f} MiB"]


def early_and_late(values: Sequence[float]) -> tuple[float, float]:
    """Medians of the second and of the last quarter: the first one warms up."""
    quarter = max(1, len(values) // 4)
    return statistics.median(values[quarter : 2 * quarter] or values), statistics.median(values[-quarter:])


def processes(state_file: Path) -> dict[str, int]:
    """Process ids by name, as ``up`` tells them now: workers, registry, router."""
    state = json.loads(state_file.read_text())
    workers = {str(worker["worker"]): int(worker["pid"]) for worker in state["workers"] if worker["running"]}
    return {**{str(name): int(pid) for name, pid in state["processes"].items()}, **workers}


def _vitals(pid: int) -> Vitals | None:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    return Vitals(time.monotonic(), pid, pages * _PAGE_BYTES, descriptors)


def _disk_bytes(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(path, name)).st_blocks * 512
            except OSError:
                continue  # gone meanwhile
    return total
