"""A thread that keeps a transfer moving: over TCP peers read from us only while somebody polls."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from epdserve.kvstore.errors import TransferUnavailable
from epdserve.kvstore.transfer.base import Transfer

_log = logging.getLogger(__name__)


_BUSY_S: Final = 0.00005  # an idle call takes some 3 us, one that moves bytes far longer


class ProgressPump:
    """Calls ``progress`` of one transfer: at once while bytes move, else every ``interval_s`` seconds.

    Stop it before the transfer is closed. An idle pump at the default costs about 2 % of a core; a peer's first
    byte over TCP waits half an interval on average.
    """

    def __init__(self, transfer: Transfer, *, interval_s: float = 0.002) -> None:
        if not interval_s > 0:
            raise ValueError(f"interval_s must be positive, got {interval_s}")
        self._transfer = transfer
        self._interval_s = interval_s
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kv-transfer-pump", daemon=True)
        self.last_progress_at = time.monotonic()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop it and wait for its end. Safe to call when it never started, and twice."""
        self._stopping = True
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            started_at = time.monotonic()
            try:
                self._transfer.progress()
            except TransferUnavailable:
                _log.info("transfer closed under its pump")
                return
            self.last_progress_at = time.monotonic()
            if self.last_progress_at - started_at < _BUSY_S:
                time.sleep(self._interval_s)  # an Event's wait costs twice as much
