"""``python -m epdserve.loadtest``: open-loop load on a running server, with its figures.

Sends ``--requests`` requests at ``--rate`` a second and prints TTFT, ITL and tokens a second.
"""

import asyncio
import json
import sys
from typing import Annotated

import httpx
import typer
from epdserve.loadtest.arrivals import at_once, poisson
from epdserve.loadtest.client import first_model, new_client
from epdserve.loadtest.figures import Figures
from epdserve.loadtest.run import send_all
from epdserve.loadtest.workloads import chat

SILENCE_S = 300.0


def main(
    url: Annotated[str, typer.Option(help="Base address of the server.")] = "http://127.0.0.1:8000",
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 32,
    rate: Annotated[
        float, typer.Option(min=0.0, help="Requests a second on average; 0 sends all at once.")
    ] = 2.0,
    words: Annotated[int, typer.Option(min=1, help="Words of each prompt.")] = 60,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    seed: Annotated[int, typer.Option(help="Same seed, same requests at the same times.")] = 1,
    api_key: Annotated[str | None, typer.Option(help="Bearer token.", envvar="EPDSERVE_API_KEY")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Open-loop load on a running server. Exit status 1 if a request failed."""
    offsets = poisson(rate, requests, seed=seed) if rate > 0 else at_once(requests)
    try:
        figures = asyncio.run(_run(url, api_key, offsets, words=words, max_tokens=max_tokens, seed=seed))
    except httpx.HTTPError as error:
        print(f"no answer from {url}: {error or type(error).__name__}", file=sys.stderr)
        raise typer.Exit(1) from None
    if as_json:
        print(json.dumps(figures.as_json()))
    else:
        for name, value in figures.rows():
            print(f"{name:14} {value}")
    raise typer.Exit(int(figures.failed > 0))


async def _run(
    url: str, api_key: str | None, offsets: list[float], *, words: int, max_tokens: int, seed: int
) -> Figures:
    async with new_client(url, api_key=api_key, silence_s=SILENCE_S, connections=len(offsets)) as client:
        model = await first_model(client)
        bodies = [
            chat(model, words=words, max_tokens=max_tokens, seed=seed + number)
            for number in range(len(offsets))
        ]
        return Figures.of(await send_all(client, bodies, offsets))


if __name__ == "__main__":
    typer.run(main)
