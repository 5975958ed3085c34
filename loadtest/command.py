"""The command line of the load test."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from epdserve.loadtest.arrivals import at_once, bursts, poisson, ramp
from epdserve.loadtest.client import first_model, new_client
from epdserve.loadtest.results import compare as comparing
from epdserve.loadtest.results import report, tables, terminal
from epdserve.loadtest.results.analysis import Prices, summarise
from epdserve.loadtest.results.record import Record, Results, Slo
from epdserve.loadtest.traffic.lexicon import counter, learn
from epdserve.loadtest.traffic.recipes import WORKLOADS, Kitchen, Sizes, build
from epdserve.loadtest.traffic.replay import read_trace, replay
from epdserve.loadtest.traffic.runner import Runner, Tally

SILENCE_S = 300.0
_ARRIVALS = ("poisson", "burst", "ramp", "once")
_BURST = 8

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def load(
    context: typer.Context,
    url: Annotated[str, typer.Option(help="Base address of the server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Its model; the first one it lists if not given.")] = None,
    workload: Annotated[str, typer.Option(help=f"{', '.join(WORKLOADS)}, or mixed.")] = "chat",
    requests: Annotated[int, typer.Option(min=1, help="How many sessions begin.")] = 32,
    rate: Annotated[
        float, typer.Option(min=0.0, help="Sessions a second on average; 0 = all at once.")
    ] = 2.0,
    arrivals: Annotated[str, typer.Option(help=f"{', '.join(_ARRIVALS)}.")] = "poisson",
    to_rate: Annotated[float, typer.Option(help="Where a ramp ends; 4 times the rate if 0.")] = 0.0,
    burst: Annotated[int, typer.Option(min=1, help="Sessions that come at a time.")] = _BURST,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of a first prompt, template included.")] = 200,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer; as many come.")] = 64,
    turns: Annotated[int, typer.Option(min=1, help="Of a conversation; an agent's has 50 if this is 1.")] = 1,
    think: Annotated[float, typer.Option(min=0.0, help="Mean seconds between turns.")] = 0.5,
    vary: Annotated[float, typer.Option(min=0.0, max=0.99, help="Lengths vary by this share.")] = 0.0,
    trace: Annotated[
        Path | None, typer.Option(help="Replay Mooncake's or Azure's instead.", dir_okay=False)
    ] = None,
    speed: Annotated[float, typer.Option(help="Times of a trace are divided by this.")] = 1.0,
    scale: Annotated[float, typer.Option(help="Lengths of a trace are multiplied by this.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Same seed, same requests at the same times.")] = 1,
    ttft: Annotated[float, typer.Option(help="Target of the first token, s.")] = 2.0,
    tpot: Annotated[float, typer.Option(help="Target of each further token, s.")] = 0.1,
    prices: Annotated[
        tuple[float, float, float], typer.Option(help="Of a million tokens: hit, missed, of answers.")
    ] = (0.0, 0.0, 0.0),
    api_key: Annotated[
        list[str] | None, typer.Option(help="One a tenant.", envvar="EPDSERVE_API_KEY")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Only what every OpenAI-compatible server takes.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="Of the run.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Results, for compare; - prints figures.")
    ] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="A page with plots.")] = None,
) -> None:
    """Open-loop load on a running server. Exit status 1 if a request ended as it should not."""
    if context.invoked_subcommand is not None:
        return
    unsaid = ("api_key", "json_file", "html_file")
    told = {key: value for key, value in context.params.items() if key not in unsaid}
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in told.items()}
    turns = 50 if workload == "agent" and turns == 1 else turns
    sizes = Sizes(prompt_tokens, max_tokens, turns, think_s=think, vary=vary)
    try:
        offsets = _offsets(arrivals, rate, to_rate, requests, burst, seed)
        asked = Asked(
            url, workload, sizes, offsets, model, tuple(api_key or (None,)), plain, seed, trace, speed, scale
        )
        results = asyncio.run(
            run(asked, name or (trace.name if trace else workload), settings, Slo(ttft, tpot))
        )
    except (httpx.HTTPError, RuntimeError, OSError, KeyError, ValueError) as error:
        print(f"load test of {url}: {error or type(error).__name__}", file=sys.stderr)
        raise typer.Exit(1) from None
    _tell(results, Prices(*prices), json_file, html_file)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="Results of a run: what --json wrote.")],
    second: Annotated[Path, typer.Argument(help="Those of another one.")],
    gate: Annotated[bool, typer.Option("--gate", help="Exit status 1 if a figure is worse.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Differences between two runs, with confidence intervals."""
    try:
        one, other = Results.load(first), Results.load(second)
        found = comparing.compare(one, other)
    except (OSError, ValueError) as error:
        print(f"compare: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps([{**asdict(each), "verdict": each.verdict} for each in found]))
    else:
        terminal.show(comparing.rows(one, other, found))
    raise typer.Exit(int(gate and any(each.verdict == "worse" for each in found)))


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be sent where."""

    url: str
    workload: str
    sizes: Sizes
    offsets: Sequence[float]
    model: str | None = None
    keys: tuple[str | None, ...] = (None,)
    plain: bool = False
    seed: int = 1
    trace: Path | None = None
    speed: float = 1.0
    scale: float = 1.0


async def run(asked: Asked, name: str, settings: Mapping[str, Any], slo: Slo) -> Results:
    """Ask the server about its model and tokenizer, send everything, and wait for all of it.

    Raises:
        httpx.HTTPError: The server does not answer.
        RuntimeError: It does not count tokens.
        KeyError, ValueError, OSError: No such workload, or the trace cannot be used.
    """
    async with new_client(asked.url, api_key=asked.keys[0], silence_s=SILENCE_S, connections=8) as client:
        model = asked.model or await first_model(client)
        lexicon = await learn(counter(client, model, plain=asked.plain))
    if asked.trace is not None:
        sessions = replay(
            read_trace(asked.trace), lexicon, speed=asked.speed, scale=asked.scale, limit=len(asked.offsets)
        )
    else:
        sessions = build(asked.workload, Kitchen(lexicon, asked.sizes, asked.seed), asked.offsets)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    with terminal.progress(len(sessions)) as tell:

        def watch(tally: Tally, record: Record | None) -> None:
            tell(tally.ended, tally.in_flight, record)

        runner = Runner(
            asked.url, model, keys=asked.keys, plain=asked.plain, silence_s=SILENCE_S, watch=watch
        )
        records = await runner.run(sessions)
    elapsed_s = max((record.at_s + record.e2e_s for record in records), default=0.0)
    return Results(name, started_at, settings, slo, elapsed_s, tuple(records))


def _offsets(arrivals: str, rate: float, to_rate: float, count: int, burst: int, seed: int) -> list[float]:
    if rate <= 0 or arrivals == "once":
        return at_once(count)
    if arrivals == "poisson":
        return poisson(rate, count, seed=seed)
    if arrivals == "burst":
        return bursts(rate, count, size=burst, seed=seed)
    if arrivals == "ramp":
        return ramp(rate, to_rate or 4 * rate, count, seed=seed)
    raise ValueError(f"arrivals are one of {', '.join(_ARRIVALS)}, not {arrivals!r}")


def _tell(results: Results, prices: Prices, json_file: Path | None, html_file: Path | None) -> None:
    if json_file is not None and str(json_file) == "-":
        print(json.dumps(summarise(results.records, results.elapsed_s, results.slo, prices).as_json()))
        raise typer.Exit(_status(results))
    terminal.show([["what", "value"], *([key, value] for key, value in tables.told(results, prices))])
    if len({record.kind for record in results.records}) > 1:
        terminal.show(tables.kinds(results), title="by kind of customer")
    if len(found := tables.tiers(results.records)) > 1:
        terminal.show(found, title="prompt tokens by tier")
    if json_file is not None:
        results.save(json_file)
    if html_file is not None:
        html_file.write_text(report.page(results, prices), encoding="utf-8")
    raise typer.Exit(_status(results))


def _status(results: Results) -> int:
    return int(any(not record.expected for record in results.records))
