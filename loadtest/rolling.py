"""``python -m epdserve.loadtest.rolling``: every process of a server restarted over and over under load.

    python -m epdserve.loadtest.rolling [--restarts 100] [--clients 4] [--seed 1] [--json FILE]

Starts a server of two prefill, two decode and an encode worker, a store and a router; records the answer to each
conversation once; then clients ask without a pause, while one process after the other gets SIGTERM, ends when it has
drained, and is back before the next one's turn. Requests are `exact`, so every answer must be the reference's text.
Fails if a request failed or was wrong, if one is stuck, if a process did not come back, or if a page is held in the
end.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer
from epdserve.loadtest import pools
from epdserve.loadtest.client import Outcome, first_model, new_client, stream_chat
from epdserve.loadtest.figures import Spread
from epdserve.loadtest.server import end_well, running_server
from epdserve.loadtest.soak_vitals import processes
from epdserve.loadtest.workloads import agent_turns

_SILENCE_S: Final = 90.0
_BACK_S: Final = 120.0
_EMPTY_S: Final = 60.0
_POLL_S: Final = 0.1
_NEVER: Final = ("registry",)  # its loss is another test's
_POOLS: Final = """
[machine]
prefill_workers = 2
decode_workers = 2
encode_workers = 1
[prefill.engine]
num_pages = 512
[decode.engine]
num_pages = 512
"""


@dataclass(slots=True)
class Report:
    """What the restarts showed.

    Attributes:
        restarts: By name of the process.
        took_s: From SIGTERM until it was back.
        waits_s: Of each request, from its sending to its end.
        moved: Requests that a draining worker sent elsewhere, or that were resumed or retried.
    """

    restarts: Counter[str] = field(default_factory=Counter)
    took_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    whole: int = 0
    moved: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    not_back: list[str] = field(default_factory=list)
    left_over: dict[str, dict[str, float]] = field(default_factory=dict)

    def problems(self) -> list[str]:
        """What must not be."""
        found = [f"failed request: {error}" for error in self.failed[:5]]
        found += [f"wrong answer: {text}" for text in self.wrong[:3]]
        found += [f"{name} did not come back" for name in self.not_back]
        found += [f"{worker} still holds {held}" for worker, held in self.left_over.items()]
        return found if self.whole else [*found, "no answer was whole"]

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def rows(self) -> list[str]:
        """For people."""
        waits, took = Spread.of(self.waits_s), Spread.of(self.took_s)
        lines = [
            f"{sum(self.restarts.values())} restarts: {dict(sorted(self.restarts.items()))}",
            f"{self.whole} answers whole, {self.moved} of them moved; "
            f"{len(self.failed)} failed, {len(self.wrong)} wrong",
        ]
        if waits and took:
            lines.append(f"request s: p50 {waits.p50:.2f}, p99 {waits.p99:.2f}, worst {waits.worst:.2f}")
            lines.append(f"restart s: p50 {took.p50:.2f}, worst {took.worst:.2f}")
        return lines


class Rolling:
    """A server, its clients, and whoever restarts its processes.

    Args:
        state_file: As ``up`` keeps it up to date.
        url: Of the API.
        bodies: What is asked, again and again.
    """

    def __init__(
        self, state_file: Path, url: str, bodies: Sequence[dict[str, Any]], *, seed: int = 1
    ) -> None:
        self._state_file, self._url, self._bodies = state_file, url, bodies
        self._dice = random.Random(seed)
        self._reference: list[str] = []
        self._over = False
        self.report = Report()

    async def run(self, *, restarts: int, clients: int, within_s: float = 3600.0) -> Report:
        """Record the reference, restart so often under load, and see what is left.

        Raises:
            RuntimeError: There is no reference.
        """
        for body in self._bodies:
            outcome = await self._ask(body)
            if not outcome.ok:
                raise RuntimeError(f"no reference answer: {outcome.error}")
            self._reference.append(outcome.text)
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._ask_on(random.Random(f"{number}/{self._dice.random()}")))
            await self._restart_all(restarts, time.monotonic() + within_s)
            self._over = True
        self.report.left_over = await held_in_the_end(self._state_file, within_s=_EMPTY_S)
        return self.report

    async def _ask(self, body: dict[str, Any]) -> Outcome:
        # a connection of its own each time: a router that ends closes those that are idle
        async with new_client(self._url, api_key=None, silence_s=_SILENCE_S, connections=1) as client:
            return await stream_chat(client, body)

    async def _ask_on(self, dice: random.Random) -> None:
        while not self._over:
            number = dice.randrange(len(self._bodies))
            outcome = await self._ask(self._bodies[number])
            report = self.report
            report.waits_s.append(outcome.ended_at - outcome.sent_at)
            if not outcome.ok:
                report.failed.append(outcome.error or f"a stream ended after {outcome.text!r}")
                await asyncio.sleep(0.5)
                continue
            report.whole += 1
            receipt = outcome.receipt
            report.moved += any(receipt.get(name) for name in ("handovers", "resumes", "retries"))
            if outcome.text != self._reference[number]:
                report.wrong.append(f"{outcome.text!r} instead of {self._reference[number]!r}")

    async def _restart_all(self, restarts: int, until: float) -> None:
        names = [name for name in sorted(processes(self._state_file)) if name not in _NEVER]
        for number in range(restarts):
            name = names[number % len(names)]
            began = time.monotonic()
            if began > until:
                return
            if not await self._restart(name):
                self.report.not_back.append(name)
                return
            self.report.restarts[name] += 1
            self.report.took_s.append(time.monotonic() - began)

    async def _restart(self, name: str) -> bool:
        before = processes(self._state_file)[name]
        os.kill(before, signal.SIGTERM)
        give_up_at = time.monotonic() + _BACK_S
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            while time.monotonic() < give_up_at:
                await asyncio.sleep(_POLL_S)
                now = processes(self._state_file).get(name, before)
                if now != before and await _is_ready(client, self._url):
                    return True
        return False


async def _is_ready(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/ready")).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


async def held_in_the_end(state_file: Path, *, within_s: float) -> dict[str, dict[str, float]]:
    """What workers still hold, by name, once nothing is held or the time is over."""
    give_up_at = time.monotonic() + within_s
    async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
        while True:
            left: dict[str, dict[str, float]] = {}
            for worker, address in _workers(state_file).items():
                try:
                    samples = await pools.read(client, address)
                except httpx.HTTPError as error:
                    left[worker] = {f"no answer: {type(error).__name__}": 1.0}
                    continue
                wanted = (pools.LEAKED, *pools.MISSING)
                held = pools.busy(samples) | {name: samples[name] for name in wanted if samples.get(name)}
                if held:
                    left[worker] = held
            if not left or time.monotonic() > give_up_at:
                return left
            await asyncio.sleep(0.2)


def _workers(state_file: Path) -> dict[str, str]:
    return pools.addresses(json.loads(state_file.read_text()))


async def conversations(
    server: Mapping[str, Any], count: int, *, seed: int, max_tokens: int
) -> list[dict[str, Any]]:
    """Bodies whose answers are always the same."""
    async with new_client(server["url"], api_key=None, silence_s=_SILENCE_S, connections=1) as client:
        model = await first_model(client)
    bodies: list[dict[str, Any]] = []
    for number in range(count):
        turns = agent_turns(model, turns=2, words=40, max_tokens=max_tokens, seed=seed + number)
        bodies += [{**body, "exact": True} for body in turns]
    return bodies


def main(
    restarts: Annotated[int, typer.Option(min=1, help="How many, all roles by turns.")] = 100,
    clients: Annotated[int, typer.Option(min=1, help="How many ask at a time.")] = 4,
    minutes: Annotated[float, typer.Option(min=0.1, help="No further restart after so long.")] = 60.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 48,
    seed: Annotated[int, typer.Option(help="Same seed, same questions.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write what was seen here.")] = None,
) -> None:
    """Restart; exit status 1 if a client noticed, or something was left over."""
    end_well()
    with tempfile.TemporaryDirectory(prefix="epdserve-rolling-") as name:
        folder = Path(name)
        (folder / "pools.toml").write_text(_POOLS)
        with running_server(folder / "state", "--config", str(folder / "pools.toml"), threads=1) as server:
            bodies = asyncio.run(conversations(server, 4, seed=seed, max_tokens=max_tokens))
            rolling = Rolling(folder / "state" / "state.json", server["url"], bodies, seed=seed)
            report = asyncio.run(rolling.run(restarts=restarts, clients=clients, within_s=60 * minutes))
    problems = report.problems()
    for line in [*report.rows(), *(f"NOT FINE: {problem}" for problem in problems)]:
        print(line)
    if json_file is not None:
        json_file.write_text(json.dumps({**report.as_json(), "problems": problems}, indent=1))
    raise typer.Exit(int(bool(problems)))


if __name__ == "__main__":
    typer.run(main)
