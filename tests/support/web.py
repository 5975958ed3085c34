"""A small HTTP server on loopback that stands for the world outside."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def world(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server that answers every request line with ``answer``; yields its port."""

    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        head = await reader.readuntil(b"\r\n\r\n")
        try:
            await answer(head.decode(), writer)
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield server.sockets[0].getsockname()[1]
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


def says(status: str, body: bytes = b"", **headers: str) -> Answer:
    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status}", *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items())]
        if "Content_Length" not in headers:
            lines.append(f"Content-Length: {len(body)}")
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    return answer
