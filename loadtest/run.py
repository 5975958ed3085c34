"""Sends requests at given times and waits for all of them."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import httpx
from epdserve.loadtest.client import Outcome, stream_chat


async def send_all(
    client: httpx.AsyncClient, bodies: Sequence[dict[str, Any]], offsets: Sequence[float]
) -> list[Outcome]:
    """One outcome for each body, in the same order; body i is sent ``offsets[i]`` seconds from now."""
    started_at = time.monotonic()

    async def one(body: dict[str, Any], offset: float) -> Outcome:
        await asyncio.sleep(max(0.0, started_at + offset - time.monotonic()))
        return await stream_chat(client, body)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(*pair)) for pair in zip(bodies, offsets, strict=True)]
    return [task.result() for task in tasks]


async def words_for_tokens(client: httpx.AsyncClient, model: str, tokens: int) -> int:
    """How many words of generated prose make a prompt of about ``tokens`` tokens, by asking the server.

    Raises:
        RuntimeError: The server refuses the question.
    """
    from epdserve.loadtest.workloads import chat

    asked = min(200, tokens)
    outcome = await stream_chat(client, chat(model, words=asked, max_tokens=1, seed=0))
    if not outcome.ok:
        raise RuntimeError(f"cannot size a prompt: {outcome.error}")
    return max(1, round(asked * tokens / outcome.prompt_tokens))
