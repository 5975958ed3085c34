"""Child processes of ``up``: each has a log file, a name, and an end.

A child gets a session of its own, so that Ctrl-C reaches only ``up``, which then stops the others in order. Should
``up`` itself be killed, the kernel sends its children SIGTERM.
"""

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from epdserve.services.cli.errors import CommandError

STOP_TIMEOUT_S = 20.0
POLL_S = 0.02
LOG_TAIL_LINES = 12
_PR_SET_PDEATHSIG = 1


class Child:
    """One running program. Started by the constructor; not thread-safe, owned by the main thread's event loop.

    Args:
        descriptors: That it inherits, under the same numbers.

    The kernel's signal comes when the *thread* that started a child ends, hence the main thread.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str],
        descriptors: Sequence[int] = (),
    ) -> None:
        self.name, self.log = name, log
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,
                preexec_fn=_die_with_parent,
                pass_fds=descriptors,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def exit_status(self) -> str | None:
        """How it ended, for people; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    async def wait_until(self, ready: Callable[[], bool], *, timeout_s: float) -> None:
        """Return once ``ready`` says so.

        Raises:
            CommandError: The child ended, or the time is up; the message holds the end of its log.
        """
        give_up_at = time.monotonic() + timeout_s
        while not ready():
            if status := self.exit_status():
                raise CommandError(
                    f"{self.name} ended with {status}; {self.log} ends with:\n{log_tail(self.log)}"
                )
            if time.monotonic() > give_up_at:
                raise CommandError(
                    f"{self.name} was not ready within {timeout_s:.0f} s; "
                    f"{self.log} ends with:\n{log_tail(self.log)}"
                )
            await asyncio.sleep(POLL_S)

    async def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ask it to end, and kill it if it does not within ``timeout_s``."""
        self._process.terminate()
        give_up_at = time.monotonic() + timeout_s
        while self._process.poll() is None and time.monotonic() < give_up_at:  # noqa: ASYNC110 - a process sets no event
            await asyncio.sleep(POLL_S)
        self.kill()

    def kill(self) -> None:
        """End it without warning, if it still runs."""
        self._process.kill()
        self._process.wait()


def log_tail(log: Path) -> str:
    """The last lines of a log, indented."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    except OSError:
        lines = []
    return "\n".join(f"    {line}" for line in lines) or "    (nothing)"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
