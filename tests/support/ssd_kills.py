"""Lives of an SSD tier, each in a process of its own that kills itself before one of its system calls.

Arguments: root, first, stop, step. The life that dies before call N plays in ``root/N``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from support.broken_disk import BrokenDisk
from support.manual_clock import ManualClock
from support.ssd_life import Life, live


def main() -> None:
    root, cuts = Path(sys.argv[1]), range(*map(int, sys.argv[2:5]))
    for cut_at in cuts:
        folder = root / str(cut_at)
        folder.mkdir(parents=True)
        child = os.fork()
        if child == 0:
            live(Life(), [folder / "one", folder / "two"], _Deadly(cut_at), ManualClock())
            os._exit(1)  # it should have died
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"call {cut_at} was never made"
        assert os.WTERMSIG(status) == signal.SIGKILL


class _Deadly(BrokenDisk):
    """Counts as ``BrokenDisk`` does, and means it."""

    def __init__(self, cut_at: int) -> None:
        super().__init__()
        self._deadly_at = cut_at

    def _step(self, operation: str, path: str, offset: int = 0) -> None:
        if self.calls == self._deadly_at:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._step(operation, path, offset)


if __name__ == "__main__":
    main()
