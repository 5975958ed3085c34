"""Clients that leave at any moment, by the hundred: nothing is left behind anywhere."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from epdserve.services.router.app import create_app
from epdserve.services.router.config import RouterConfig
from starlette.types import Message
from support.fake_cluster import FakeCluster, Script
from support.real_tokenizer import real_tokenizer


async def one_request(app: Any, leave_after_s: float, *, stream: bool) -> bool:
    """Ask, leave after a while; whether a whole answer came before that."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "stream": stream}
    messages: list[Message] = [
        {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
    ]
    answered = asyncio.Event()

    async def receive() -> Message:
        if messages:
            return messages.pop()
        try:
            async with asyncio.timeout(leave_after_s):
                await answered.wait()
        except TimeoutError:
            pass
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            answered.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [],
        "extensions": {},
    }
    await app(scope, receive, send)
    return answered.is_set()


@pytest.mark.parametrize("seed", range(3))
async def test_nothing_is_left_of_clients_that_leave_at_random(seed: int) -> None:
    rng = random.Random(seed)
    ids = real_tokenizer().native.encode("a thought</think>" + "an answer of some words " * 3)
    script = Script(ids, prefill_s=0.02, first_gap_s=0.02, gap_s=0.002)
    cluster = FakeCluster(script)
    config = RouterConfig(model_dir=Path("unused"), model_name="demo", max_in_flight_requests=10_000)
    app = create_app(config, cluster, tokenizer=real_tokenizer())
    parts = app.state.parts
    # However slow the machine, some leave before and some stay until they are answered.
    stays_s = [(0.0, 60.0, rng.uniform(0, 0.3))[min(number % 5, 2)] for number in range(150)]
    requests = [one_request(app, stay_s, stream=rng.random() < 0.5) for stay_s in stays_s]
    answered = await asyncio.gather(*requests)
    assert 0 < sum(answered) < len(answered)
    assert cluster.running_prefills == cluster.running_decodes == 0
    assert cluster.open_leases == set()
    load = parts.admission.load
    assert (load.requests, load.tokens, parts.bodies.held_bytes) == (0, 0, 0)
    ledger = parts.pipeline._ledger
    assert [ledger.requests(name) for name in ("p0", "d0")] == [0, 0]
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
