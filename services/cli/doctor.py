"""``epdserve doctor``: what of this machine is fine, what is not, and what to do about it.

Heavy libraries are asked in child processes with a deadline: a driver that hangs or a library that aborts
costs one row of the table and not the command.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from epdserve.services.cli import checks
from epdserve.services.cli.checks import REINSTALL, Finding, Verdict
from rich.console import Console
from rich.table import Table

PROBE_DEADLINE_S = 60.0

_DEVICES_PROBE = """
import json, torch
from epdserve.kernels.checksum import HOST_CHECKSUM_KERNEL
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
seen = {"devices": names, "threads": torch.get_num_threads(), "checksum": HOST_CHECKSUM_KERNEL}
print(json.dumps(seen))
"""
_TRANSFER_PROBE = """
import json, os, time
import numpy as np
from epdserve.kvstore.transfer.base import Copy, TransferState
from epdserve.kvstore.transfer.nixl import NixlTransfer, shipped_plugins
from epdserve.kvstore.types import HOST_MEMORY, MemoryRegion

nbytes = 1 << 20
source = np.frombuffer(os.urandom(nbytes), np.uint8).copy()
target = np.zeros(nbytes, np.uint8)
holder, reader = NixlTransfer("holder"), NixlTransfer("reader")
holder.register(MemoryRegion("bytes", source.ctypes.data, nbytes, 1, HOST_MEMORY))
reader.register(MemoryRegion("bytes", target.ctypes.data, nbytes, 1, HOST_MEMORY))
ticket = reader.read(reader.connect(holder.endpoint()), [Copy("bytes", 0, "bytes", 0, nbytes)])
give_up_at = time.monotonic() + 10
while ticket.wait(0.001) is TransferState.PENDING and time.monotonic() < give_up_at:
    holder.progress()
moved = ticket.poll() is TransferState.DONE and bool((source == target).all())
print(json.dumps({"plugins": shipped_plugins(), "moved": moved}))
"""
_STYLES = {Verdict.FINE: "green", Verdict.NOTE: "yellow", Verdict.NOT_FINE: "bold red"}


def run(*, folder: Path, host: str, port: int) -> int:
    """Print the table.

    Args:
        folder: Where ``up`` would keep its files.
        host: Address that ``up`` would listen on.
        port: Port that ``up`` would listen on.

    Returns:
        0 if nothing is in the way of ``up``, else 1.
    """
    table = Table(box=None, pad_edge=False)
    for heading in ("", "", "seen", "what to do"):
        table.add_column(heading, overflow="fold")
    worst = Verdict.FINE
    for finding in examine(folder=folder, host=host, port=port):
        mark = f"[{_STYLES[finding.verdict]}]{finding.verdict.value}[/]"
        table.add_row(finding.subject, mark, finding.seen, finding.remedy)
        if finding.verdict is Verdict.NOT_FINE:
            worst = Verdict.NOT_FINE
    console = Console()
    console.print(table)
    in_the_way = worst is Verdict.NOT_FINE
    console.print("Not fine: see the rows marked so." if in_the_way else "This machine can run epdserve.")
    return int(in_the_way)


def examine(*, folder: Path, host: str, port: int) -> Iterator[Finding]:
    """All findings, cheap ones first."""
    yield checks.check_platform()
    yield checks.check_python()
    yield checks.check_memory()
    yield checks.check_disk(folder)
    yield checks.check_direct_io(folder)
    yield checks.check_shared_memory()
    yield checks.check_port(host, port)
    for package in checks.NEEDED_PACKAGES:
        yield checks.check_package(package)
    yield from _check_devices()
    yield _check_transfer()


def _check_devices() -> Iterator[Finding]:
    subject = "devices"
    try:
        seen = _probe(_DEVICES_PROBE)
    except _ProbeError as failure:
        yield Finding(subject, Verdict.NOT_FINE, str(failure), REINSTALL)
        return
    if devices := seen["devices"]:
        yield Finding(
            subject, Verdict.NOTE, ", ".join(devices), "GPU workers are not built yet; the CPU is used"
        )
    else:
        yield Finding(subject, Verdict.FINE, f"CPU, {seen['threads']} threads")
    yield _judge_checksum(seen["checksum"])


def _judge_checksum(kernel: str) -> Finding:
    if kernel == "numpy":
        remedy = "install a C compiler and Python's headers, then epdserve again: verified copies get faster"
        return Finding("checksums on hosts", Verdict.NOTE, kernel, remedy)
    return Finding("checksums on hosts", Verdict.FINE, kernel)


def _check_transfer() -> Finding:
    subject = "NIXL plug-ins"
    try:
        seen = _probe(_TRANSFER_PROBE)
    except _ProbeError as failure:
        return Finding(subject, Verdict.NOT_FINE, str(failure), REINSTALL)
    if not seen["moved"]:
        remedy = "look at UCX_TLS and UCX_NET_DEVICES; ucx_info -d lists what UCX finds"
        return Finding(subject, Verdict.NOT_FINE, "UCX did not move 1 MiB between two agents", remedy)
    others = ", ".join(name for name in seen["plugins"] if name != "UCX")
    return Finding(subject, Verdict.FINE, f"UCX moved 1 MiB between two agents; also there: {others}")


class _ProbeError(Exception):
    """The child did not answer; the message is its last line."""


def _probe(program: str) -> dict[str, Any]:
    command = [sys.executable, "-P", "-c", program]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        raise _ProbeError(f"no answer within {PROBE_DEADLINE_S:.0f} s") from None
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines()
        raise _ProbeError(lines[-1] if lines else f"exit status {child.returncode}")
    answer: dict[str, Any] = json.loads(child.stdout.strip().splitlines()[-1])
    return answer
