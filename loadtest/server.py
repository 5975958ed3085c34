"""Starts and stops what is measured, through the command line as any user would."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 1200.0
COMMAND = (sys.executable, "-P", "-m", "epdserve.services.cli")


def end_well() -> None:
    """SIGTERM ends this program as an exception does, so that what it has started is stopped."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


class CommandFailedError(Exception):
    """A command of the project ended badly; the message holds the end of what it printed."""


@contextmanager
def running_server(state_dir: Path, *arguments: str, threads: int) -> Iterator[dict[str, Any]]:
    """``epdserve up`` on a free port until the block ends; yields what it says about itself.

    Args:
        state_dir: Folder for its files; must not exist yet.
        arguments: Further arguments of ``up``.
        threads: Threads of the arithmetic library in each worker.

    Raises:
        CommandFailedError: It ended, or is not ready in time.
    """
    words = [*COMMAND, "up", "--port", "0", "--state-dir", str(state_dir), *arguments]
    output = state_dir.with_suffix(".out")
    with output.open("wb") as sink:
        server = subprocess.Popen(words, stdout=sink, stderr=subprocess.STDOUT, env=_environment(threads))
    try:
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while not (state_dir / "state.json").is_file():
            if server.poll() is not None or time.monotonic() > give_up_at:
                raise CommandFailedError(f"up did not become ready: {output.read_text()[-2000:]}")
            time.sleep(0.1)
        yield json.loads((state_dir / "state.json").read_text())
    finally:
        server.terminate()
        try:
            server.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def command(*arguments: str, threads: int) -> str:
    """Run one command of the project to its end; returns what it printed.

    Raises:
        CommandFailedError: It failed.
    """
    run = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        env=_environment(threads),
        check=False,
    )
    if run.returncode != 0:
        raise CommandFailedError(f"{arguments[0]} ended with {run.returncode}: {run.stderr[-2000:]}")
    return run.stdout


def _environment(threads: int) -> dict[str, str]:
    # Passive waiting: several processes share few cores, and spinning threads would take them from one another.
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
