"""Mixed-effort load for real pools, and what became of it: who was served within its targets."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx
from epdserve.loadtest.arrivals import poisson
from epdserve.loadtest.client import Outcome, first_model, new_client, stream_chat
from epdserve.loadtest.figures import Spread
from epdserve.loadtest.run import send_all
from epdserve.loadtest.workloads import prose

SILENCE_S: Final = 120.0
RAMP_S: Final = 6.0
EFFORTS: Final = (25, 50, 75, 100)
CONVERSATIONS: Final = 12  # requests of one share the beginning of their prompts
_TOKENS_AT_75: Final = 24
_SPREAD: Final = 0.5  # of the logarithm of lengths


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request is to see."""

    ttft_s: float
    tpot_s: float

    def met(self, outcome: Outcome) -> bool:
        """Whether it did; an answer of one token has no time a token."""
        ttft_s, tpot_s = outcome.ttft_s, outcome.itl_s
        return outcome.ok and ttft_s is not None and ttft_s <= self.ttft_s and (tpot_s or 0.0) <= self.tpot_s


def mixed(model: str, count: int, *, seed: int, shared: bool = True) -> list[dict[str, Any]]:
    """Bodies of ``count`` requests: efforts in equal parts, an answer's length doubles with every 25 of effort.

    Args:
        shared: Prompts of a conversation begin alike; else each is its own.
    """
    draw = random.Random(seed)
    bodies = []
    for _ in range(count):
        effort = draw.choice(EFFORTS)
        tokens = _TOKENS_AT_75 * 2 ** ((effort - 75) / 25) * draw.lognormvariate(0, _SPREAD)
        words = min(300, max(8, round(draw.lognormvariate(4, _SPREAD))))
        beginning = prose(60, random.Random(draw.randrange(CONVERSATIONS)) if shared else draw)
        bodies.append(
            {
                "model": model,
                "messages": [
                    {"role": "system", "content": beginning},
                    {"role": "user", "content": prose(words, draw)},
                ],
                "reasoning_effort": effort,
                "temperature": 0,
                "max_tokens": max(2, round(tokens)),
                "ignore_eos": True,
            }
        )
    return bodies


@dataclass(frozen=True, slots=True)
class Leg:
    """One policy under one load.

    Attributes:
        goodput: Requests a second that met both targets; the seconds are those of the arrivals.
    """

    name: str
    offered: float
    requests: int
    met: int
    refused: int
    failed: int
    goodput: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    seconds: float


async def open_loop(
    url: str, name: str, *, rate: float, seconds: float, targets: Targets, seed: int, shared: bool = True
) -> tuple[Leg, list[Outcome]]:
    """Requests at a rate, however the server fares."""
    offsets = [at for at in poisson(rate, round(2 * rate * seconds) + 8, seed=seed) if at < seconds]
    async with new_client(url, api_key=None, silence_s=SILENCE_S, connections=len(offsets)) as client:
        bodies = mixed(await first_model(client), len(offsets), seed=seed, shared=shared)
        outcomes = await send_all(client, bodies, offsets)
    good = [outcome for outcome in outcomes if outcome.ok]
    met = sum(map(targets.met, outcomes))
    refused = sum(outcome.error is not None and outcome.error.startswith("429") for outcome in outcomes)
    began, ended = min(o.sent_at for o in outcomes), max(o.ended_at for o in outcomes)
    leg = Leg(
        name,
        round(rate, 2),
        len(outcomes),
        met,
        refused,
        len(outcomes) - len(good) - refused,
        round(met / seconds, 3),
        _ms(outcome.ttft_s for outcome in good),
        _ms(outcome.itl_s for outcome in good),
        round(ended - began, 1),
    )
    return leg, outcomes


async def closed_loop(url: str, *, clients: int, seconds: float, seed: int, ramp_s: float = RAMP_S) -> float:
    """Requests a second that ``clients`` get who ask again at once, once all of them have been at it for ``ramp_s``."""
    async with new_client(url, api_key=None, silence_s=SILENCE_S, connections=clients) as client:
        bodies = mixed(await first_model(client), 4096, seed=seed)
        end_at = time.monotonic() + ramp_s + seconds
        done: list[Outcome] = []

        async def ask(number: int) -> None:
            while time.monotonic() < end_at:
                done.append(await stream_chat(client, bodies[number % len(bodies)]))
                number += clients

        await asyncio.gather(*(ask(number) for number in range(clients)))
    return _rate(done, end_at - seconds, end_at)


async def warm(url: str, *, requests: int = 4) -> None:
    """First steps of every worker, which nobody counts."""
    async with new_client(url, api_key=None, silence_s=SILENCE_S, connections=requests) as client:
        await send_all(client, mixed(await first_model(client), requests, seed=0), [0.0] * requests)


def ready(url: str) -> bool:
    """Whether the server would take a request."""
    try:
        return httpx.get(f"{url}/ready", timeout=5, trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _rate(done: Sequence[Outcome], began: float, ended: float) -> float:
    return sum(outcome.ok and outcome.ended_at <= ended for outcome in done) / (ended - began)


def _ms(values: Any) -> Spread | None:
    return Spread.of(None if value is None else round(1000 * value, 1) for value in values)
