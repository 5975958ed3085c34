"""What images cost a server: TTFT with them, beside them, and without.

    python -m epdserve.loadtest.vision.serving [--json FILE]

Starts servers with an encode pool through the command line, and asks over HTTP with streams of one token. All figures
of a row come from one run, in turns. Servers, their workers and this client share the machine's cores.
"""

import asyncio
import base64
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import numpy as np
import typer
from epdserve.loadtest.client import new_client, stream_chat
from epdserve.loadtest.figures import percentile
from epdserve.loadtest.kv_bench.row import Row, Target
from epdserve.loadtest.server import command, running_server
from epdserve.loadtest.workloads import prose
from PIL import Image

_SIDE: Final = 448
_TEXT_WORDS: Final = 400
_OVERLAP_ROUNDS: Final = 25
_HIT_ROUNDS: Final = 40
_LOAD_ROUNDS: Final = 8
_LOAD_REQUESTS: Final = 40
_SETTLE_S: Final = 1.0
_SILENCE_S: Final = 120.0

Body = dict[str, Any]


def picture_bytes(seed: int) -> bytes:
    """A JPEG that no other seed gives: colours with a little noise, as a photograph has."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (14, 14, 3)).astype(np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((_SIDE, _SIDE), Image.Resampling.BICUBIC))
    noisy = (smooth + draw.integers(-6, 7, smooth.shape)).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(noisy).save(file, "JPEG", quality=85)
    return file.getvalue()


def body(model: str, content: list[Body] | str) -> Body:
    """One greedy request for one token."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 1,
        "ignore_eos": True,
        "thinking": {"type": "disabled"},
    }


def text_and_picture(model: str, seed: int, words: int = _TEXT_WORDS) -> Body:
    """Text first: what can be computed while the picture is embedded."""
    said = {"type": "text", "text": prose(words, random.Random(seed))}
    url = "data:image/jpeg;base64," + base64.b64encode(picture_bytes(seed)).decode()
    return body(model, [said, {"type": "image_url", "image_url": {"url": url}}])


async def ttft_ms(client: httpx.AsyncClient, asked: Body) -> float:
    """Of one request.

    Raises:
        RuntimeError: It failed.
    """
    return (await _ask(client, asked))[0]


async def _ask(client: httpx.AsyncClient, asked: Body) -> tuple[float, dict[str, Any]]:
    outcome = await stream_chat(client, asked)
    if not outcome.ok:
        raise RuntimeError(f"a request failed: {outcome.error}")
    return 1e3 * ((outcome.text_at or [outcome.ended_at])[0] - outcome.sent_at), outcome.usage


async def overlap(on: str, off: str, model: str) -> list[Row]:
    """Cold pictures behind new text on two servers that differ in ``encode_first``."""
    times: dict[str, list[float]] = {on: [], off: []}
    async with _client(on) as first, _client(off) as second:
        clients = {on: first, off: second}
        for seed in range(_OVERLAP_ROUNDS + 2):
            for url, client in clients.items():
                taken = await ttft_ms(client, text_and_picture(model, 1000 + seed))
                if seed >= 2:
                    times[url].append(taken)
    return [
        Row(
            f"TTFT of text + image, encode beside prefill, {name}",
            percentile(sorted(times[on]), rank),
            "ms",
            percentile(sorted(times[off]), rank),
            "encode first",
            Target(1.0, at_most=True),
        )
        for name, rank in (("p50", 50), ("p90", 90))
    ]


async def cache_hit(url: str, model: str) -> Row:
    """A chat whose picture and text are cached, beside cached text of as many tokens."""
    async with _client(url) as client:
        shown = text_and_picture(model, 1)
        _, usage = await _ask(client, shown)
        said = await _text_of(client, model, int(usage["prompt_tokens"]))
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(_HIT_ROUNDS + 3):
            for asked, taken in zip((shown, said), times, strict=True):
                ms = await ttft_ms(client, asked)
                if number >= 3:
                    taken.append(ms)
    with_image, text = (percentile(sorted(taken), 50) for taken in times)
    return Row(
        "TTFT of text + image that hit, p50",
        with_image,
        "ms",
        text,
        "text of as many tokens that hits",
        Target(1.1, at_most=True),
    )


async def _text_of(client: httpx.AsyncClient, model: str, tokens: int) -> Body:
    """Text only, of ``tokens`` tokens to within a few."""
    words = tokens
    for _ in range(8):
        asked = body(model, prose(words, random.Random(99)))
        got = int((await _ask(client, asked))[1]["prompt_tokens"])
        if abs(got - tokens) <= 4:
            break
        words += (tokens - got) * words // max(1, got) or (1 if got < tokens else -1)
    return asked


async def saturation(url: str, model: str, encoder: "Encoder") -> list[Row]:
    """TTFT of new, short, text-only requests, one after another, in turns with and without a saturated pool."""
    quiet: list[float] = []
    loaded: list[float] = []
    busy: list[float] = []
    seeds = iter(range(10_000, 10**9))
    async with _client(url) as client:
        await _texts(client, model, seeds, 10)
        for _ in range(_LOAD_ROUNDS):
            quiet += await _texts(client, model, seeds, _LOAD_REQUESTS)
            with encoder.saturated():
                await asyncio.sleep(_SETTLE_S)
                before = encoder.cpu_s()
                began = asyncio.get_running_loop().time()
                loaded += await _texts(client, model, seeds, _LOAD_REQUESTS)
                busy.append((encoder.cpu_s() - before) / (asyncio.get_running_loop().time() - began))
            await asyncio.sleep(_SETTLE_S)
    share = sum(busy) / len(busy)
    return [
        Row(
            f"TTFT of text beside an encode pool {share:.0%} busy, {name}",
            percentile(sorted(loaded), rank),
            "ms",
            percentile(sorted(quiet), rank),
            "beside an idle one",
            target,
        )
        for name, rank, target in (("p50", 50, None), ("p99", 99, Target(1.05, at_most=True)))
    ]


async def _texts(client: httpx.AsyncClient, model: str, seeds: Iterator[int], count: int) -> Sequence[float]:
    return [await ttft_ms(client, body(model, prose(30, random.Random(next(seeds))))) for _ in range(count)]


class Encoder:
    """The encode worker of a server, and a process that keeps it busy.

    Worker and load get the last core for themselves and everything else the others: a pool has machines of its own.
    """

    def __init__(self, state: dict[str, Any], token_file: Path, tokens: int) -> None:
        [worker] = [worker for worker in state["workers"] if worker["role"] == "encode"]
        self.pid, self._address = int(worker["pid"]), str(worker["address"])
        self._arguments = (str(token_file), str(tokens))
        self._core = max(os.sched_getaffinity(0))
        self.others = [int(each["pid"]) for each in state["workers"] if each["role"] != "encode"]
        self.others += [int(pid) for pid in state["processes"].values()]

    def pin(self) -> None:
        """Give the encode worker a core of its own.

        Raises:
            RuntimeError: There is but one.
        """
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            raise RuntimeError("a pool of its own needs a second core")
        _pin(self.pid, {cores[-1]})
        for pid in [*self.others, os.getpid()]:
            _pin(pid, set(cores[:-1]))

    def cpu_s(self) -> float:
        """Processor seconds of the worker so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @contextmanager
    def saturated(self) -> Iterator[None]:
        """More images than it can embed, over its own RPC: no other worker sees them."""
        command = [sys.executable, "-P", "-m", "epdserve.loadtest.vision.load", self._address]
        with subprocess.Popen([*command, *self._arguments]) as load:
            _pin(load.pid, {self._core})
            try:
                yield
            finally:
                load.terminate()


def _pin(pid: int, cores: set[int]) -> None:
    """All threads of a process that are there."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def _client(url: str) -> httpx.AsyncClient:
    return new_client(url, api_key=None, silence_s=_SILENCE_S, connections=4)


def _settings(folder: Path, *, encode_first: bool) -> Path:
    file = folder / f"{encode_first}.toml"
    file.write_text(
        "[machine]\nencode_workers = 1\nstore = false\n[router.images]\n"
        f"encode_first = {str(encode_first).lower()}\n"
    )
    return file


async def _measure(folder: Path) -> list[Row]:
    rows, model = [], str(folder / "model")
    command("demo-model", model, threads=1)
    on, off = (_settings(folder, encode_first=first) for first in (False, True))
    with (
        running_server(folder / "on", "--model", model, "--config", str(on), threads=1) as beside,
        running_server(folder / "off", "--model", model, "--config", str(off), threads=1) as first,
    ):
        rows += await overlap(beside["url"], first["url"], beside["model"])
    with running_server(folder / "load", "--model", model, "--config", str(on), threads=1) as server:
        rows.append(await cache_hit(server["url"], server["model"]))
        encoder = Encoder(server, _token_file(folder / "load"), await _span(server["url"], server["model"]))
        encoder.pin()
        rows += await saturation(server["url"], server["model"], encoder)
    return rows


def _token_file(state_dir: Path) -> Path:
    """Where a server keeps the token of internal calls: its router's settings tell."""
    return Path(tomllib.loads((state_dir / "router.toml").read_text())["cluster_token_file"])


async def _span(url: str, model: str) -> int:
    """Tokens that the load's picture takes in a prompt."""
    async with _client(url) as client:
        with_picture = (await _ask(client, text_and_picture(model, 0, words=1)))[1]
        without = (await _ask(client, body(model, prose(1, random.Random(0)))))[1]
    return int(with_picture["prompt_tokens"]) - int(without["prompt_tokens"])


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the rows here.")] = None,
) -> None:
    """Measure and print one table."""
    with tempfile.TemporaryDirectory() as scratch:
        rows = asyncio.run(_measure(Path(scratch)))
    print("| what | measured | floor | ratio | target |\n|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row.cells()) + " |")
    if json_file is not None:
        json_file.write_text(json.dumps([row.as_json() for row in rows], indent=1))


if __name__ == "__main__":
    typer.run(main)
