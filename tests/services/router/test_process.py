"""The router as its own process, in front of workers without a model; the official Python client talks to it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest
from epdserve.services.pool.registry import Registry
from epdserve.services.router.__main__ import main
from epdserve.services.rpc.server import serve_decode, serve_prefill
from epdserve.services.types import WorkerRole
from support.fake_decode import TOKEN, FakeDecode, worker_info
from support.fake_prefill import FakePrefill
from support.real_tokenizer import real_tokenizer_json
from support.valkey import url_of, valkey_server


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model directory with a tokenizer, a cluster token and a registry; ``router.toml`` names them."""
    folder = tmp_path_factory.mktemp("router")
    (folder / "tokenizer.json").write_text(real_tokenizer_json(), encoding="utf-8")
    (folder / "token").write_text(TOKEN)
    with valkey_server() as server:
        (folder / "url").write_text(url_of(server))
        (folder / "router.toml").write_text(
            f'port = 0\nmodel_dir = "{folder}"\nmodel_name = "demo"\ndrain_timeout_s = 2.0\n'
            f'registry_url = "{url_of(server)}"\ncluster_token_file = "{folder / "token"}"\n'
        )
        yield folder


@asynccontextmanager
async def workers(files: Path) -> AsyncIterator[FakeDecode]:
    """A prefill and a decode worker, announced."""
    prefill, decode = FakePrefill(), FakeDecode()
    servers = [
        await serve_prefill(prefill, token=TOKEN),
        await serve_decode(decode, decode.sessions, token=TOKEN),
    ]
    stepper = asyncio.create_task(decode.run())
    async with Registry((files / "url").read_text(), lease_s=60) as registry:
        await registry.publish(worker_info("w", role=WorkerRole.PREFILL, address=servers[0].address))
        await registry.publish(worker_info("decode-0", address=servers[1].address))
        try:
            yield decode
        finally:
            stepper.cancel()
            await asyncio.wait([stepper])
            for server in servers:
                await server.stop(grace_s=0)


def start(files: Path, port: int) -> subprocess.Popen[str]:
    config = files / f"{port}.toml"
    config.write_text((files / "router.toml").read_text().replace("port = 0", f"port = {port}"))
    return subprocess.Popen(
        [sys.executable, "-m", "epdserve.services.router", "--config", str(config)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )


async def until_ready(url: str) -> None:
    async with asyncio.timeout(30), httpx.AsyncClient() as client:
        while True:
            try:
                if (await client.get(f"{url}/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)


async def test_the_openai_client_chats_and_sigterm_ends_cleanly(files: Path, unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    async with workers(files) as decode:
        process = start(files, unused_tcp_port)
        try:
            await until_ready(url)
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                await chat(client)
                await bad_requests(client)
                await leave(client, decode)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 10) == 0
        finally:
            process.kill()
            _, errors = await asyncio.to_thread(process.communicate)
    assert "Traceback" not in errors


async def chat(client: openai.AsyncOpenAI) -> None:
    """Whole and streamed."""
    assert [model.id async for model in client.models.list()] == ["demo"]
    answer = await client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Hello"}], max_tokens=12
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    stream = await client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


async def bad_requests(client: openai.AsyncOpenAI) -> None:
    """The client knows our errors."""
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="x", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "x"}], temperature=7
        )
    assert caught.value.param == "temperature"


async def leave(client: openai.AsyncOpenAI, decode: FakeDecode) -> None:
    """A client that goes away stops the work on the worker."""
    stream = await client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "x"}], max_tokens=3000, stream=True
    )
    await anext(aiter(stream))
    assert decode.running
    await stream.close()
    async with asyncio.timeout(0.5):
        while decode.running:  # noqa: ASYNC110 - the worker is plain state
            await asyncio.sleep(0.005)


async def test_a_port_in_use_is_one_line_and_no_trace(files: Path, unused_tcp_port: int) -> None:
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", unused_tcp_port)
    async with server:
        process = start(files, unused_tcp_port)
        _, errors = await asyncio.to_thread(process.communicate, None, 20)
    assert process.returncode == 1
    assert errors == f"127.0.0.1:{unused_tcp_port} is in use\n"


def test_check_prints_the_settings(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(files / "router.toml"), "--check"]) == 0
    printed = capsys.readouterr().out
    assert 'model_name = "demo"' in printed
    assert "max_body_bytes = 8388608" in printed


def test_unknown_settings_are_refused_by_name(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = files / "bad.toml"
    bad.write_text('model_dir = "x"\nprot = 1\n')
    assert main(["--config", str(bad)]) == 2
    assert "prot" in capsys.readouterr().err
