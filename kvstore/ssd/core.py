"""What the parts of the tier share: two locks, the inventory, the queue, and what happens when a drive fails.

``lock`` guards memory and is never held over I/O, so that ``try_put`` and ``contains`` never wait for a disk.
``io_lock`` is held by whoever writes to disk (pump, sweep, delete, check), and is taken first. Readers take only
``lock``: what they read is proven by its bytes.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from epdserve.kvstore.clock import Clock
from epdserve.kvstore.ssd.directory import Directory
from epdserve.kvstore.ssd.inventory import Inventory
from epdserve.kvstore.ssd.metrics import SsdMetrics
from epdserve.kvstore.ssd.pacing import TierTime
from epdserve.kvstore.ssd.record import RecordLayout
from epdserve.kvstore.ssd.retention import RetentionPolicy
from epdserve.kvstore.ssd.write_behind import WriteBehind

log = logging.getLogger(__name__)
MAX_IO_ERRORS: Final = 8  # single bad blocks are a drive's daily life; more are its end
_FATAL: Final = {errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.EBADF}


@dataclass(slots=True)
class TierCore:
    """State of one tier."""

    layout: RecordLayout
    policy: RetentionPolicy
    clock: Clock
    time: TierTime
    inventory: Inventory
    queue: WriteBehind
    metrics: SsdMetrics
    nothing_may_go: bool = False  # the last sweep found everything younger than the floor
    quiet_until_s: int = 0  # tier time before which a sweep would find the same
    achieved_age_s: float | None = None  # idle time of what went last for space
    lock: threading.RLock = field(default_factory=threading.RLock)
    io_lock: threading.RLock = field(default_factory=threading.RLock)

    def fail(self, directory: Directory, operation: str, error: OSError) -> None:
        """A drive serves no more: its blocks are misses, its files are left as they are."""
        with self.lock:
            if directory.failed is not None:
                return
            directory.failed = f"{operation}: {error}"
            lost = self.inventory.drop_directory(directory)
        self.metrics.evictions.labels(reason="directory").inc(lost)
        log.error("ssd directory failed", extra={"folder": directory.folder, "reason": directory.failed})

    def note_error(self, directory: Directory, operation: str, error: OSError) -> None:
        """A call on a slot failed; too many, or one that cannot be a single block's fault, end the drive."""
        self.metrics.io_errors.labels(operation=operation).inc()
        if error.errno == errno.ENOSPC:
            return
        directory.io_errors += 1
        if error.errno in _FATAL or directory.io_errors >= MAX_IO_ERRORS:
            self.fail(directory, operation, error)

    def write_names(self, directory: Directory, slots: Iterable[int] = (), *, sync: bool) -> bool:
        """Bring names to disk; says whether they are there. A drive whose table fails serves no more."""
        if directory.failed is not None:
            return False
        try:
            directory.write_names(slots, sync=sync)
        except OSError as error:
            self.metrics.io_errors.labels(operation="names").inc()
            self.fail(directory, "names", error)
            return False
        return True

    def settle(self, directory: Directory) -> None:
        """Make gone names durably gone, then let their slots be written again."""
        if self.write_names(directory, sync=True):
            with self.lock:
                directory.release_left()
