"""Which addresses processes listen on."""

import contextlib
import os
from pathlib import Path

# as /proc/net/tcp writes them: 127.0.0.1 and its IPv6 form
_LOOPBACK = ("0100007F:", "0000000000000000FFFF00000100007F:")


def off_loopback(addresses: set[str]) -> set[str]:
    """Those that other machines can reach."""
    return {address for address in addresses if not address.startswith(_LOOPBACK)}


def subprocess_pids(pid: int) -> list[int]:
    """Children of a process, and theirs."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may end meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *subprocess_pids(int(child))]
    return found


def listening_addresses(pid: int) -> set[str]:
    """Local addresses that a process listens on, as /proc/net/tcp writes them."""
    sockets = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(link))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1])
    return found
