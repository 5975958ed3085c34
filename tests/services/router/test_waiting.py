"""Whole answers that take long: what their clients see meanwhile, and what they are told when it goes wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from support.conformance import bench, spoken
from support.fake_cluster import Script

PATH = "/v1/chat/completions"


@asynccontextmanager
async def client_of(script: Script, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with bench(script, **settings) as router:
        yield router.http


async def post(client: httpx.AsyncClient, path: str = PATH) -> httpx.Response:
    body = {"model": "demo", "max_tokens": 8, "messages": [{"role": "user", "content": "x"}]}
    return await client.post(path, json=body)


@pytest.mark.parametrize("first_gap_s", [0.1, 0.0], ids=["queued", "decoding"])
async def test_a_whole_answer_that_takes_long_has_blank_lines_before_it(first_gap_s: float) -> None:
    script = Script(spoken("add</think>It is 4, I think."), first_gap_s=first_gap_s)
    script.gap_s = 0.03 - first_gap_s / 4
    async with client_of(script, keep_alive_s=0.03) as client:
        slow = await post(client)
    assert slow.text.startswith("\n\n")
    assert "content-length" not in slow.headers
    async with client_of(script, keep_alive_s=0.03, keep_alive_whole=False) as client:
        plain = await post(client)
    assert plain.text.startswith("{")
    assert slow.json()["choices"] == plain.json()["choices"]


@pytest.mark.parametrize("path", [PATH, "/v1/messages"])
async def test_a_whole_answer_that_fails_after_a_blank_line_says_so_in_its_body(path: str) -> None:
    script = Script(spoken("x"), first_gap_s=0.1, die_after=0)
    async with client_of(script, keep_alive_s=0.03, max_resumes=0, replacement_wait_s=0.0) as client:
        response = await post(client, path)
    assert (response.status_code, response.text[:1]) == (200, "\n")
    assert response.json()["error"]["message"]
