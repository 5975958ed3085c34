"""A wall clock that jumps under a real process: a few lines of C between it and the C library."""

from __future__ import annotations

import mmap
import struct
import subprocess
from pathlib import Path

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile long long *ahead_s;
static int (*real_clock)(clockid_t, struct timespec *);

__attribute__((constructor)) static void start(void) {
    int file = open(getenv("WALL_CLOCK_FILE"), O_RDONLY);
    ahead_s = mmap(0, sizeof *ahead_s, PROT_READ, MAP_SHARED, file, 0);
    real_clock = dlsym(RTLD_NEXT, "clock_gettime");
}

int clock_gettime(clockid_t id, struct timespec *at) {
    if (!real_clock) real_clock = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real_clock(id, at);
    if (!failed && ahead_s && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += *ahead_s;
    return failed;
}

int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


class WallClock:
    """The wall clock of every process that starts with ``env``; the monotonic one is left alone, as it is by NTP.

    Needs gcc.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        source, library, file = folder / "clock.c", folder / "clock.so", folder / "ahead"
        source.write_text(_SOURCE)
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        file.write_bytes(bytes(8))
        with file.open("r+b") as opened:
            self._ahead = mmap.mmap(opened.fileno(), 8)
        self.env = {"LD_PRELOAD": str(library), "WALL_CLOCK_FILE": str(file)}

    @property
    def ahead_s(self) -> int:
        """Of this process's own."""
        (ahead,) = struct.unpack("<q", self._ahead[:8])
        return int(ahead)

    def jump(self, seconds: int) -> None:
        """Set it forward, or back."""
        self._ahead[:8] = struct.pack("<q", self.ahead_s + seconds)
