"""What streams feel of the rendering of long chats beside them."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

from epdserve.loadtest.router_bench.waits import steady_streams

# What was asked last may be rendered still
_SETTLE_S: Final = 1.0
_ASK_LONG: Final = """
import sys, urllib.request
body = sys.stdin.buffer.read()
print(flush=True)
for _ in range(1000):
    request = urllib.request.Request(sys.argv[1] + "/v1/chat/completions", body, {"content-type": "application/json"})
    urllib.request.urlopen(request, timeout=60).read()
"""


def long_prompt(
    url: str, *, long: bytes, steady: bytes, rounds: int = 10, seconds: float = 2.0
) -> dict[str, Any]:
    """Waits between tokens of steady streams while long chats are rendered one after the other, and without.

    Rounds with and without alternate, and which comes first does too: a busy machine changes its mind between them.
    What is told of the differences is their median and the interval that holds it in nineteen of twenty such runs.

    Args:
        long: Body of a long chat.
        steady: Of the streams it is put beside.
    """
    pairs = []
    with steady_streams(url, steady, clients=8) as waits:
        for number in range(rounds):
            found = {}
            for busy in (number % 2 == 0, number % 2 == 1):
                with _asking(url, long) if busy else nullcontext():
                    found[busy] = _p99_ms(waits(seconds))
            pairs.append((found[False], found[True]))
    more = sorted(busy - quiet for quiet, busy in pairs)
    low, high = _median_interval(len(more))
    return {
        "prompt_bytes": len(long),
        "quiet_itl_p99_ms": round(statistics.median(quiet for quiet, _ in pairs), 2),
        "busy_itl_p99_ms": round(statistics.median(busy for _, busy in pairs), 2),
        "more_ms": round(statistics.median(more), 2),
        "more_ms_95": [round(more[low], 2), round(more[high], 2)],
        "rounds": [(round(quiet, 1), round(busy, 1)) for quiet, busy in pairs],
    }


def _median_interval(count: int) -> tuple[int, int]:
    """Places of the sorted values between which the median lies with 95 % (order statistics, no assumption)."""
    chance, low = 0.5**count, 0
    while low + 1 < count // 2 and chance + math.comb(count, low + 1) * 0.5**count <= 0.025:
        low += 1
        chance += math.comb(count, low) * 0.5**count
    return low, count - 1 - low


@contextmanager
def _asking(url: str, body: bytes) -> Iterator[None]:
    """Another process asks for long chats; the block begins once the first one is on its way."""
    command = [sys.executable, "-P", "-c", _ASK_LONG, url]
    asker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert asker.stdin is not None
    assert asker.stdout is not None
    try:
        asker.stdin.write(body)
        asker.stdin.close()
        asker.stdout.readline()
        yield
    finally:
        asker.terminate()
        asker.wait()
        asker.stdout.close()
        time.sleep(_SETTLE_S)


def _p99_ms(waits: list[float]) -> float:
    return 1000 * statistics.quantiles(waits, n=100)[98]
