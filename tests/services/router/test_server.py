"""The router on real sockets: socket options, limits before any application code, clients that vanish."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from epdserve.services.errors import Unavailable
from epdserve.services.router.config import RouterConfig
from epdserve.services.router.server import bind
from support.fake_cluster import FakeCluster, Script
from support.live_server import LiveRouter, eventually, live_router
from support.real_tokenizer import real_tokenizer


def config(**changes: Any) -> RouterConfig:
    return RouterConfig(model_dir=Path("unused"), model_name="demo", drain_timeout_s=1, **changes)


def ids(text: str) -> list[int]:
    return real_tokenizer().native.encode(text)


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster(Script(ids("hm</think>one two three four five six seven"), gap_s=0.002))


@pytest.fixture
async def router(cluster: FakeCluster) -> AsyncIterator[LiveRouter]:
    async with live_router(
        config(max_header_bytes=2048, header_timeout_s=0.3, body_timeout_s=0.3), cluster
    ) as router:
        yield router


def request_bytes(port: int, **changes: Any) -> bytes:
    body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "x"}], **changes}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x:{port}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def test_head_sends_no_body_and_leaves_the_connection_usable(router: LiveRouter) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    async with asyncio.timeout(5):
        writer.write(b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\nGET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"content-length: 15" in head
        assert (await reader.read(12)) == b"HTTP/1.1 200"
    writer.close()


async def test_accepted_sockets_do_not_delay_small_writes(router: LiveRouter) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(request_bytes(router.port, stream=True))
    await reader.readuntil(b"data: ")
    (connection,) = router.server.server_state.connections
    accepted: socket.socket = connection.transport.get_extra_info("socket")
    assert accepted.getpeername() == writer.get_extra_info("sockname")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
    writer.close()


async def test_events_arrive_one_by_one(router: LiveRouter, cluster: FakeCluster) -> None:
    cluster.script.gap_s = 0.05
    loop = asyncio.get_running_loop()
    arrivals: list[float] = []
    async with httpx.AsyncClient(base_url=router.url) as client:
        body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.headers["cache-control"] == "no-cache"
            assert response.headers["x-accel-buffering"] == "no"
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    arrivals.append(loop.time())
    gaps = sorted(b - a for a, b in itertools.pairwise(arrivals))
    assert 0.03 < gaps[len(gaps) // 2] < 0.09


async def test_headers_that_never_end_are_cut_off(router: LiveRouter) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(b"GET /health HTTP/1.1\r\n" + b"x-a: b\r\n" * 1000)
    answer = await asyncio.wait_for(reader.read(), 2)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "headers_too_large"
    writer.close()


async def test_a_long_body_behind_short_headers_is_not_taken_for_headers(router: LiveRouter) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    messages = [{"role": "user", "content": "x" * 10_000}]
    writer.write(request_bytes(router.port, messages=messages))
    assert (await asyncio.wait_for(reader.readline(), 2)).startswith(b"HTTP/1.1 200 ")
    writer.close()


@pytest.mark.parametrize("start", [b"", b"GET /heal"], ids=["silent", "stuck"])
async def test_headers_that_do_not_come_cost_the_connection(router: LiveRouter, start: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(start)
    assert await asyncio.wait_for(reader.read(), 2) == b""
    writer.close()


async def test_what_is_no_http_gets_the_error_body(router: LiveRouter) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(b"\x16\x03\x01 hello\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 2)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert "error" in json.loads(answer.split(b"\r\n\r\n")[1])
    writer.close()


async def test_a_body_that_does_not_come_is_refused(router: LiveRouter) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(request_bytes(router.port)[:-5])
    assert (await asyncio.wait_for(reader.readline(), 2)).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_a_body_over_the_limit_is_refused_before_it_comes(cluster: FakeCluster) -> None:
    async with live_router(config(max_body_bytes=2048), cluster) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10000000\r\n\r\nxx")
        assert (await asyncio.wait_for(reader.readline(), 1)).startswith(b"HTTP/1.1 413 ")
        writer.close()
        async with httpx.AsyncClient(base_url=router.url) as client:
            response = await client.post("/v1/chat/completions", content=b"x" * 10_000_000)
            assert response.status_code == 413
            chunks = (b"y" * 1000 for _ in range(100))

            async def endless() -> AsyncIterator[bytes]:
                for chunk in chunks:
                    yield chunk

            response = await client.post("/v1/chat/completions", content=endless())
            assert response.status_code == 413


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_during_prefill_cancels_it(
    router: LiveRouter, cluster: FakeCluster, stream: bool
) -> None:
    cluster.script.prefill_s = 30.0
    _, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(request_bytes(router.port, stream=stream))
    await eventually(lambda: cluster.running_prefills == 1)
    writer.close()
    await eventually(lambda: cluster.running_prefills == 0, within_s=0.25)
    assert cluster.cancelled_prefills == 1
    assert cluster.decode_jobs == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_gives_the_lease_back(
    router: LiveRouter, cluster: FakeCluster, stream: bool
) -> None:
    cluster.script.first_gap_s = 30.0
    _, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(request_bytes(router.port, stream=stream))
    await eventually(lambda: cluster.running_decodes == 1)
    writer.close()
    await eventually(lambda: cluster.running_decodes == 0, within_s=0.25)
    await eventually(lambda: cluster.open_leases == set(), within_s=0.25)
    assert cluster.released == ["lease0"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_in_mid_stream_cancels_decoding(
    router: LiveRouter, cluster: FakeCluster, stream: bool
) -> None:
    cluster.script.ids = ids("hm</think>") + ids(" word") * 1000
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(request_bytes(router.port, stream=stream))
    await eventually(lambda: cluster.running_decodes == 1)
    if stream:
        await reader.readuntil(b"word")
    else:
        await asyncio.sleep(0.05)
    writer.transport.abort()
    await eventually(lambda: cluster.running_decodes == 0, within_s=0.25)
    assert cluster.cancelled_decodes == 1
    async with httpx.AsyncClient(base_url=router.url) as client:
        text = (await client.get("/metrics")).text
    assert 'epdserve_router_requests_total{outcome="cancelled"} 1.0' in text
    assert "epdserve_router_in_flight_requests 0.0" in text


async def test_a_client_that_leaves_after_a_long_body_is_noticed(
    router: LiveRouter, cluster: FakeCluster
) -> None:
    cluster.script.ids = ids("hm</think>") + ids(" word") * 1000
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    # Beyond what the server reads ahead: it has stopped reading, and only who reads hears an end
    writer.write(request_bytes(router.port, stream=True, of_no_meaning="x" * 200_000))
    await reader.readuntil(b"word")
    writer.transport.abort()
    await eventually(lambda: cluster.running_decodes == 0, within_s=0.25)
    assert cluster.cancelled_decodes == 1


async def test_the_next_request_of_a_connection_is_watched_too(
    router: LiveRouter, cluster: FakeCluster
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    cluster.script.ids = ids("</think>word")
    writer.write(request_bytes(router.port, stream=True))
    await reader.readuntil(b"[DONE]")
    cluster.script.ids = ids("hm</think>") + ids(" word") * 1000
    writer.write(request_bytes(router.port, stream=True))
    await reader.readuntil(b"word")
    writer.transport.abort()
    await eventually(lambda: cluster.running_decodes == 0, within_s=0.25)
    assert cluster.cancelled_decodes == 1


async def test_requests_sent_at_once_are_answered_one_after_the_other(router: LiveRouter) -> None:
    """The last one says that it is: its answer says so, too, and the connection ends behind it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    whole, streamed = request_bytes(router.port), request_bytes(router.port, stream=True)
    writer.write(whole + streamed + streamed.replace(b"host:", b"connection: close\r\nhost:"))
    async with asyncio.timeout(5):
        answers = (await reader.read()).split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert [b"content-length: " in answer for answer in answers] == [True, False, False]
    assert [b"transfer-encoding: chunked\r\n" in answer for answer in answers] == [False, True, True]
    assert [b"connection: close\r\n" in answer for answer in answers] == [False, False, True]
    assert all(answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for answer in answers[1:])
    writer.close()


async def test_a_client_that_does_not_read_is_cut_off(cluster: FakeCluster) -> None:
    cluster.script = Script(ids("</think>") + ids(" word") * 4000)
    async with live_router(config(send_stall_s=0.3), cluster, send_buffer_bytes=4096) as router:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", router.port))
        await asyncio.get_running_loop().sock_sendall(sock, request_bytes(router.port, stream=True))
        await eventually(lambda: len(cluster.decode_jobs) == 1)
        await eventually(lambda: not router.server.server_state.connections, within_s=5)
        assert cluster.running_decodes == 0
        sock.close()


async def test_a_port_in_use_is_said_in_one_line(router: LiveRouter) -> None:
    with pytest.raises(Unavailable, match=rf"127\.0\.0\.1:{router.port} is in use"):
        bind("127.0.0.1", router.port)


async def test_shutdown_lets_a_running_stream_finish(cluster: FakeCluster) -> None:
    cluster.script.gap_s = 0.03
    async with live_router(config(), cluster) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(request_bytes(router.port, stream=True))
        await reader.readuntil(b"data: ")
        router.server.should_exit = True
        rest = await asyncio.wait_for(reader.read(), 3)
        assert b"data: [DONE]" in rest
        writer.close()
    assert cluster.closed


async def test_shutdown_tells_a_stream_that_takes_too_long(cluster: FakeCluster) -> None:
    cluster.script = Script(ids("</think>") + ids(" word") * 3000, gap_s=0.01)
    async with live_router(config(), cluster) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(request_bytes(router.port, stream=True))
        await reader.readuntil(b"data: ")
        router.server.should_exit = True
        rest = await asyncio.wait_for(reader.read(), 5)
        assert b"the server shuts down" in rest
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()
    assert cluster.running_decodes == 0


async def test_bodies_together_have_a_limit(cluster: FakeCluster) -> None:
    limits = config(max_body_bytes=100_000, max_bodies_bytes=150_000, body_timeout_s=5.0)
    async with live_router(limits, cluster) as router:
        held = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99000\r\n\r\n"
                + b" " * 80_000
            )
            held.append((reader, writer))
        async with asyncio.timeout(2):
            lines = [asyncio.create_task(reader.readline()) for reader, _ in held]
            done, waiting = await asyncio.wait(lines, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in done] == [b"HTTP/1.1 429 Too Many Requests\r\n"]
        for task in waiting:
            task.cancel()
        for _, writer in held:
            writer.close()
        parts = router.server.config.loaded_app.state.parts
        await eventually(lambda: parts.bodies.held_bytes == 0)


async def test_a_request_on_its_way_when_the_server_ends_gets_its_answer(cluster: FakeCluster) -> None:
    async with live_router(config(), cluster) as router, asyncio.timeout(5):
        streams = [await asyncio.open_connection("127.0.0.1", router.port) for _ in range(2)]
        (half_reader, half), (idle_reader, idle) = streams
        request = request_bytes(router.port)
        half.write(request[:60])  # accepted, and not yet read
        idle.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await idle_reader.readuntil(b"ok")
        router.server.should_exit = True
        await asyncio.sleep(0.25)
        half.write(request[60:])
        idle.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")  # it did not know
        for reader in (half_reader, idle_reader):
            told = await reader.read()  # to the end: the server closes
            head = told[: told.rindex(b"\r\n\r\n")].lower()
            assert b"http/1.1 200 ok" in head
            assert b"connection: close" in head
        for _, writer in streams:
            writer.close()
