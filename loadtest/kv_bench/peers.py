"""Rows of other projects' stores, measured in the same run by an interpreter that has them (``peer_stores.py``)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

from epdserve.loadtest.kv_bench.row import Row, Rows

_SCRIPT: Final = Path(__file__).with_name("peer_stores.py")
_PEERS: Final = {
    "mooncake": "Mooncake store, one process, TCP, batches",
    "lmcache": "LMCache LocalCPUBackend",
}
_PATIENCE_S: Final = 300.0


def measure(python: Path | None) -> Rows:
    """Put and get of 256 blocks by each peer that runs; what does not run is named on standard error."""
    for peer, name in _PEERS.items() if python is not None else ():
        run = subprocess.run(
            [str(python), "-P", str(_SCRIPT), peer],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
        if run.returncode != 0:
            reason = (run.stderr.strip().splitlines() or [f"status {run.returncode}"])[-1]
            print(f"no rows of {peer}: {reason}", file=sys.stderr)
            continue
        figures = json.loads(run.stdout.strip().splitlines()[-1])
        for what in ("put", "get"):
            yield Row(f"{name}: {what}", figures[what], "GB/s", figures["memcpy"], "memcpy in its process")
