"""Clients that mean no good, on a real socket: each is answered or dropped, and the router is as well as before."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from epdserve.services.router.config import RouterConfig
from support.conformance import spoken
from support.fake_cluster import FakeCluster, Script
from support.live_server import LiveRouter, eventually, live_router

POSTS = [
    "/v1/chat/completions",
    "/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
]


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster(Script(spoken("</think>well")))


@pytest.fixture
async def router(cluster: FakeCluster) -> AsyncIterator[LiveRouter]:
    settings: dict[str, Any] = {"body_timeout_s": 0.3, "header_timeout_s": 0.3, "send_stall_s": 1.0}
    config = RouterConfig(model_dir=Path("unused"), model_name="demo", **settings)
    async with live_router(config, cluster) as running:
        await _is_well(running, cluster)  # series of first times are there from now on
        before = await _series(running)
        yield running
        await _is_well(running, cluster)
        # Whatever was sent, no time series came of it
        assert await _series(running) == before


async def _series(router: LiveRouter) -> set[str]:
    async with httpx.AsyncClient(base_url=router.url) as http:
        text = (await http.get("/metrics")).text
    return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}


async def _is_well(router: LiveRouter, cluster: FakeCluster) -> None:
    parts = router.app.state.parts
    await eventually(
        lambda: (parts.admission.load.requests, parts.bodies.held_bytes) == (0, 0), within_s=10.0
    )
    assert (cluster.running_prefills, cluster.running_decodes, cluster.open_leases) == (0, 0, set())
    cluster.script = Script(spoken("</think>well"))
    async with httpx.AsyncClient(base_url=router.url, timeout=20) as http:
        body = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
        answer = await http.post("/v1/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["content"] == "well"


async def raw(router: LiveRouter, data: bytes, *, half_close: bool = False) -> bytes:
    """What comes back for these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(data)
    await writer.drain()
    if half_close:
        writer.write_eof()
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    except (TimeoutError, ConnectionResetError):
        return b""
    finally:
        writer.close()


def request(body: bytes, path: str = "/v1/chat/completions", *headers: str) -> bytes:
    """A request whose connection ends with its answer."""
    lines = [
        f"POST {path} HTTP/1.1",
        "host: x",
        "connection: close",
        f"content-length: {len(body)}",
        *headers,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


HELLO = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "x"}]}).encode()


async def test_half_closed_sockets(router: LiveRouter) -> None:
    # An end of the client's sending side is its leaving, as for every server on this protocol stack
    for body in (HELLO, HELLO[:20]):
        await raw(router, request(body), half_close=True)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 999\r\n\r\n{"
    await raw(router, head, half_close=True)


async def test_bodies_that_trickle(router: LiveRouter) -> None:
    async def trickle() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(request(HELLO)[: -len(HELLO)])
        answer = asyncio.create_task(reader.read(65_536))
        for byte in HELLO:
            writer.write(bytes([byte]))
            done, _ = await asyncio.wait([answer], timeout=0.05)
            if done:
                break
        writer.close()
        return await answer

    answers = await asyncio.gather(*(trickle() for _ in range(20)))
    assert all(b" 408 " in answer for answer in answers)


async def test_compressed_bombs(router: LiveRouter) -> None:
    bomb = gzip.compress(b" " * 50_000_000)
    for encoding in ("gzip", "br", "gzip, gzip", "deflate"):
        answer = await raw(router, request(bomb, POSTS[0], f"content-encoding: {encoding}"))
        assert b" 415 " in answer


@pytest.mark.parametrize("path", POSTS)
async def test_values_that_are_no_values(router: LiveRouter, path: str) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    for body in (
        b'{"model": "demo", "temperature": NaN}',
        b'{"model": "demo", "temperature": 1e400}',
        b'{"model": "demo", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "demo", "messages": ' + deep + b', "input": ' + deep + b"}",
        b'{"model": "demo", "messages": [{"role": "user", "content": "\\ud800"}], "prompt": "\\udfff"}',
        b'{"model": "\\u0000\\r\\nset-cookie: a=b", "messages": [], "prompt": "x", "input": "x"}',
        b"\x00\xff\xfe",
        json.dumps({"model": "demo", "stop": ["x"] * 10_000, "stop_sequences": ["x"] * 10_000}).encode(),
    ):
        answer = await raw(router, request(body, path))
        assert answer.split(b" ", 2)[1] in (b"400", b"404"), (body[:60], answer[:300])
        assert b"set-cookie: a=b" not in answer.partition(b"\r\n\r\n")[0].lower()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "(a+)+$"},
        {"type": "string", "pattern": "(.{1,5000}){1,5000}"},
        {"type": "string", "pattern": "((a{0,1000}){0,1000}){0,1000}"},
        {"type": "array", "minItems": 10**9, "items": {"type": "string"}},
        {"type": "string", "maxLength": 10**12},
        {"$ref": "#"},
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"enum": [str(number) for number in range(20_000)]},
        {"properties": {str(number): {"type": "string"} for number in range(3000)}},
    ],
    ids=range(9),
)
async def test_schemas_that_cost_too_much(router: LiveRouter, schema: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
    base = json.loads(HELLO)
    for fields in (
        {"response_format": form},
        {"tools": [tool]},
        {"tools": [tool], "tool_choice": "required"},
    ):
        answer = await raw(router, request(json.dumps({**base, **fields}).encode()))
        assert answer.split(b" ", 2)[1] in (b"200", b"400", b"429"), answer[:300]


async def test_headers_that_inject(router: LiveRouter) -> None:
    for value in ("a\rset-cookie: b", "a\nb", "x" * 5000, "\x01", "caf\xe9"):
        answer = await raw(
            router, request(HELLO, POSTS[0], f"x-request-id: {value}", f"traceparent: {value}")
        )
        head = answer.partition(b"\r\n\r\n")[0]
        assert b"set-cookie" not in head
        assert b"x" * 5000 not in head


async def test_a_scanner_on_random_paths(router: LiveRouter) -> None:
    rng = random.Random(1)
    letters = "abc/.%?=&_-~:;"
    async with httpx.AsyncClient(base_url=router.url, timeout=20) as http:
        for number in range(300):
            path = "/" + "".join(rng.choices(letters, k=rng.randint(0, 40)))
            method = rng.choice(["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
            try:
                response = await http.request(method, path, content=b"x" * (number % 7))
            except httpx.InvalidURL:
                continue
            assert response.status_code in (400, 404, 405), (method, path, response.status_code)
    for path in ("/../../etc/passwd", "/v1/models/../../x", "/v1//chat/completions", "*", "http://router/y"):
        answer = await raw(router, f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        assert b" 500 " not in answer.partition(b"\r\n")[0]


@pytest.mark.parametrize("clients", [200, pytest.param(1000, marks=pytest.mark.slow)])
async def test_many_clients_vanish_at_once(router: LiveRouter, cluster: FakeCluster, clients: int) -> None:
    cluster.script = Script(spoken("a" * 50) * 50, gap_s=0.5)
    body = json.dumps({**json.loads(HELLO), "stream": True}).encode()
    writers = []
    for _ in range(clients):
        _, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(request(body))
        writers.append(writer)
    await eventually(lambda: cluster.running_decodes > 100, within_s=30.0)
    for writer in writers:
        writer.transport.abort()
    await eventually(lambda: cluster.running_decodes == 0, within_s=30.0)
