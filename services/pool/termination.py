"""SIGTERM inside a Ray actor.

An async actor's main thread sits in native code, where Python's handlers never run, and Ray replaces handlers that
were set before. The signal's number, however, still goes to the wake-up descriptor. ``install`` must run in the main
thread: Ray calls it as the worker process's setup hook.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable

SETUP_HOOK = f"{__name__}.install"

_reader: socket.socket | None = None
_writer: socket.socket | None = None


def install() -> None:
    """Have the numbers of signals written where ``on_sigterm`` reads them."""
    global _reader, _writer
    _reader, _writer = socket.socketpair()
    _writer.setblocking(False)
    signal.set_wakeup_fd(_writer.fileno(), warn_on_full_buffer=False)


def on_sigterm(callback: Callable[[], None]) -> bool:
    """Call back from a thread of its own for every SIGTERM.

    Returns:
        False if ``install`` has not run: the process then dies of SIGTERM as usual.
    """
    reader = _reader
    if reader is None:
        return False

    def watch() -> None:
        while data := reader.recv(16):
            if signal.SIGTERM in data:
                callback()

    threading.Thread(target=watch, name="sigterm", daemon=True).start()
    return True
