"""``python -m epdserve.loadtest.disconnect``: how soon pools are empty after a client has left, at any phase.

    python -m epdserve.loadtest.disconnect [--state STATE_JSON] [--requests N] [--json FILE]

Each request is abandoned at a random moment of its life: its connection is closed, and from then on every worker's
``/metrics`` is read over and over until nothing is filled, sealed, leased, staged, running or waiting any more. Reading
takes its time too, and rounds up: what one reading of all idle workers takes stands beside the figure.
"""

import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer
from epdserve.loadtest import pools
from epdserve.loadtest.client import Outcome, first_model, new_client, stream_chat
from epdserve.loadtest.figures import Spread
from epdserve.loadtest.server import running_server
from epdserve.loadtest.workloads import chat

TARGET_P99_MS: Final = 250.0
_GIVE_UP_S: Final = 30.0
_SILENCE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Departure:
    """One abandoned request."""

    left_after_s: float
    phase: str  # "before the first token", or "between tokens"
    empty_after_ms: float


async def measure(
    server: Mapping[str, Any], *, requests: int, words: int, max_tokens: int, seed: int
) -> list[Departure]:
    """Leave ``requests`` times; one client at a time, so that pools can be empty.

    Raises:
        RuntimeError: Pools were not empty before a request, or not within 30 s after.
    """
    dice = random.Random(seed)
    departures = []
    async with (
        new_client(server["url"], api_key=None, silence_s=_SILENCE_S, connections=1) as client,
        httpx.AsyncClient(trust_env=False, timeout=_GIVE_UP_S) as reader,
    ):
        model = await first_model(client)
        whole = await stream_chat(client, chat(model, words=words, max_tokens=max_tokens, seed=seed))
        life_s = whole.ended_at - whole.sent_at
        await _until_empty(server, reader)
        for number in range(requests):
            body = chat(model, words=words, max_tokens=max_tokens, seed=seed + 1 + number)
            departures.append(await _leave(server, reader, body, dice.uniform(0, life_s)))
    return departures


async def reading_ms(server: Mapping[str, Any], times: int = 20) -> Spread:
    """What one reading of all workers takes while nothing runs."""
    taken = []
    async with httpx.AsyncClient(trust_env=False, timeout=_GIVE_UP_S) as reader:
        for _ in range(times):
            started = time.monotonic()
            await _until_empty(server, reader)
            taken.append(1e3 * (time.monotonic() - started))
    spread = Spread.of(taken)
    assert spread is not None, "something was measured"
    return spread


async def _leave(
    server: Mapping[str, Any], reader: httpx.AsyncClient, body: dict[str, Any], after_s: float
) -> Departure:
    outcome = Outcome(sent_at=time.monotonic())
    # a client of its own: closing it closes the connection
    client = new_client(server["url"], api_key=None, silence_s=_SILENCE_S, connections=1)
    talking = asyncio.create_task(stream_chat(client, body, outcome))
    await asyncio.wait([talking], timeout=after_s)
    started = bool(outcome.text_at)
    talking.cancel()
    await asyncio.wait([talking])
    await client.aclose()
    left_at = time.monotonic()
    await _until_empty(server, reader)
    phase = "between tokens" if started else "before the first token"
    return Departure(after_s, phase, 1e3 * (time.monotonic() - left_at))


async def _until_empty(server: Mapping[str, Any], reader: httpx.AsyncClient) -> None:
    waiting = pools.addresses(server)
    give_up_at = time.monotonic() + _GIVE_UP_S
    while waiting:
        samples = await asyncio.gather(*(pools.read(reader, address) for address in waiting.values()))
        held = dict(zip(waiting, map(pools.busy, samples), strict=True))
        waiting = {worker: address for worker, address in waiting.items() if held[worker]}
        if waiting and time.monotonic() > give_up_at:
            raise RuntimeError(f"still held: {held}")


def main(
    state: Annotated[
        Path | None,
        typer.Option(help="state.json of a running `epdserve up`; else one is started.", dir_okay=False),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many are abandoned.")] = 200,
    words: Annotated[int, typer.Option(min=1, help="Words of each prompt.")] = 600,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    seed: Annotated[int, typer.Option(help="Same seed, same requests.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")] = None,
) -> None:
    """Measure, print; exit status 1 if the 99th percentile misses 250 ms."""
    with contextlib.ExitStack() as stack:
        if state is not None:
            server = json.loads(state.read_text())
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="epdserve-disconnect-")))
            server = stack.enter_context(running_server(folder / "state", threads=1))
        departures = asyncio.run(
            measure(server, requests=requests, words=words, max_tokens=max_tokens, seed=seed)
        )
        reading = asyncio.run(reading_ms(server))
    by_phase = {"at any phase": departures}
    for departure in departures:
        by_phase.setdefault(departure.phase, []).append(departure)
    print(f"one reading of all workers, idle: p50 {reading.p50:.0f} ms, worst {reading.worst:.0f} ms")
    for phase, some in by_phase.items():
        spread = Spread.of(one.empty_after_ms for one in some)
        assert spread is not None, "every phase here has departures"
        print(
            f"disconnect to all pools empty, {phase}, {len(some)} requests: "
            f"p50 {spread.p50:.0f}, p90 {spread.p90:.0f}, p99 {spread.p99:.0f}, worst {spread.worst:.0f} ms"
        )
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(departure) for departure in departures], indent=1))
    whole = Spread.of(departure.empty_after_ms for departure in departures)
    assert whole is not None, "at least one request is abandoned"
    raise typer.Exit(int(whole.p99 >= TARGET_P99_MS))


if __name__ == "__main__":
    typer.run(main)
