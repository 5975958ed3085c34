"""Where a worker stands: its address, ports and machine, which differ from pod to pod and are no settings of a file.

An orchestrator says them in the environment (or on the command line, under the same names): the Kubernetes chart does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Place:
    """One worker's.

    Attributes:
        host: Address to bind to, which peers dial too.
        port: Of the gRPC server; 0 takes a free one.
        metrics_port: Likewise, of ``/metrics``.
        probe_port: Of ``/live`` and ``/ready``; None = none.
        machine: Workers of one machine share its store; empty = what the pool's settings say.
        pid_file: Where the process writes its number while it runs, for ``epdserve stop-worker``.
    """

    host: str = "127.0.0.1"
    port: int = 0
    metrics_port: int = 0
    probe_port: int | None = None
    machine: str = ""
    pid_file: Path | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Place:
        """What ``EPDSERVE_HOST``, ``_PORT``, ``_METRICS_PORT``, ``_PROBE_PORT``, ``_MACHINE``, ``_PID_FILE`` say.

        Raises:
            ValueError: A port is no number.
        """
        probe, pid_file = environ.get("EPDSERVE_PROBE_PORT"), environ.get("EPDSERVE_PID_FILE")
        return cls(
            host=environ.get("EPDSERVE_HOST", "127.0.0.1"),
            port=int(environ.get("EPDSERVE_PORT", "0")),
            metrics_port=int(environ.get("EPDSERVE_METRICS_PORT", "0")),
            probe_port=int(probe) if probe else None,
            machine=environ.get("EPDSERVE_MACHINE", ""),
            pid_file=Path(pid_file) if pid_file else None,
        )
