"""The single measurements of :mod:`epdserve.loadtest.foundation`, on a server that runs and in one process."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from epdserve.loadtest.arrivals import at_once
from epdserve.loadtest.client import Outcome, new_client, stream_chat
from epdserve.loadtest.figures import decode_rate
from epdserve.loadtest.run import send_all, words_for_tokens
from epdserve.loadtest.server import command
from epdserve.loadtest.workloads import chat

SILENCE_S = 600.0
TRANSFER_BYTES = re.compile(r"^epdserve_kvstore_transfer_bytes_total\s+(\S+)$", re.MULTILINE)
WORKER_STAGES = ("prefill_queue", "prefill", "decode_queue", "handoff", "decode")


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of the run."""

    batch: int = 8
    prompt_words: int = 40
    answer_tokens: int = 192
    rounds: int = 3
    router_requests: int = 60
    handoff_tokens: int = 8192
    handoff_requests: int = 5
    threads: int = 1


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """What a server showed. Times in seconds."""

    tokens_per_s: float
    together: list[Outcome]
    added_s: list[float]
    http_s: list[float]
    router_s: list[float]
    prepare_s: list[float]
    handoff_s: list[float]
    handoff_bytes: int


def bodies(plan: Plan, model: str) -> list[dict[str, Any]]:
    """The requests of the decode comparison."""
    return [
        chat(model, words=plan.prompt_words, max_tokens=plan.answer_tokens, seed=seed)
        for seed in range(plan.batch)
    ]


def added_s(outcome: Outcome) -> float:
    """Time of a one-token request that no worker accounts for: router, RPC, sockets and the client itself."""
    stages = outcome.receipt["ms"]
    accounted_ms = sum(float(stages[name]) for name in WORKER_STAGES)
    return outcome.ended_at - outcome.sent_at - accounted_ms / 1e3


async def measure_server(plan: Plan, server: Mapping[str, Any]) -> ServerFigures:
    """All figures of a running server, one after the other, so that none disturbs another.

    Args:
        server: What ``up`` says about itself.

    Raises:
        RuntimeError: A request failed.
    """
    async with new_client(server["url"], api_key=None, silence_s=SILENCE_S, connections=plan.batch) as client:
        model = server["model"]
        await _decode(plan, client, model)  # the first round pays for first touches of memory and caches
        rounds = [await _decode(plan, client, model) for _ in range(plan.rounds)]
        rate, together = sorted(rounds, key=lambda pair: pair[0])[len(rounds) // 2]
        singles = [
            await _one(client, chat(model, words=plan.prompt_words, max_tokens=1, seed=1000 + number))
            for number in range(plan.router_requests)
        ]
        http = [await _refusal_s(client, plan) for _ in range(plan.router_requests)]
        handoff, nbytes = await _handoff(plan, client, model, server)
    return ServerFigures(
        tokens_per_s=rate,
        together=together,
        added_s=[added_s(outcome) for outcome in singles],
        http_s=http,
        router_s=[outcome.receipt["ms"]["router"] / 1e3 for outcome in singles],
        prepare_s=[outcome.receipt["ms"]["prepare"] / 1e3 for outcome in singles],
        handoff_s=handoff,
        handoff_bytes=nbytes,
    )


async def _refusal_s(client: httpx.AsyncClient, plan: Plan) -> float:
    """Time of the same exchange without any generation: the server refuses the model's name."""
    outcome = await stream_chat(client, chat("no-such-model", words=plan.prompt_words, max_tokens=1, seed=0))
    return outcome.ended_at - outcome.sent_at


async def _decode(plan: Plan, client: httpx.AsyncClient, model: str) -> tuple[float, list[Outcome]]:
    outcomes = await send_all(client, bodies(plan, model), at_once(plan.batch))
    for outcome in outcomes:
        _check(outcome)
    return decode_rate([(outcome.text_at, outcome.completion_tokens) for outcome in outcomes]), outcomes


async def _handoff(
    plan: Plan, client: httpx.AsyncClient, model: str, server: Mapping[str, Any]
) -> tuple[list[float], int]:
    """Seconds of each hand-off, and bytes of one."""
    words = await words_for_tokens(client, model, plan.handoff_tokens)
    before = await _transferred_bytes(server)
    taken = []
    for number in range(plan.handoff_requests):
        outcome = await _one(client, chat(model, words=words, max_tokens=1, seed=2000 + number))
        taken.append(outcome.receipt["ms"]["handoff"] / 1e3)
    moved = await _transferred_bytes(server) - before
    return taken, round(moved / plan.handoff_requests)


async def _one(client: httpx.AsyncClient, body: dict[str, Any]) -> Outcome:
    return _check(await stream_chat(client, body))


def _check(outcome: Outcome) -> Outcome:
    if not outcome.ok:
        raise RuntimeError(f"a request failed: {outcome.error}")
    return outcome


async def _transferred_bytes(server: Mapping[str, Any]) -> float:
    total = 0.0
    async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
        for worker in server["workers"]:
            page = (await client.get(f"http://{worker['metrics_address']}/metrics")).text
            total += sum(float(value) for value in TRANSFER_BYTES.findall(page))
    return total


def measure_one_process(plan: Plan, model_dir: Path, scratch: Path) -> tuple[float, list[str]]:
    """Tokens a second of the same requests in one process, and their texts.

    Raises:
        CommandFailedError: ``generate`` failed.
    """
    requests = scratch / "requests.json"
    requests.write_text(json.dumps(bodies(plan, "local")))
    sizes = ("--rounds", str(plan.rounds + 1), "--threads", str(plan.threads))
    arguments = ("--model", str(model_dir), "--requests", str(requests), *sizes)
    told = json.loads(command("generate", "--json", *arguments, threads=plan.threads))["rounds"]
    # The first round pays for first touches of memory and caches, here as on the server.
    rates = sorted(
        decode_rate([(a["token_at_s"], len(a["token_at_s"])) for a in answers]) for answers in told[1:]
    )
    return rates[len(rates) // 2], [answer["text"] for answer in told[-1]]
