"""Waiting for what another task does, with an end to the patience."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], *, timeout_s: float = 5.0) -> None:
    """Return once the condition holds.

    Raises:
        TimeoutError: It did not within the time.
    """
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - conditions here are plain state, nobody sets an event
            await asyncio.sleep(0.002)
