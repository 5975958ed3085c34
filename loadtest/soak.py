"""``python -m epdserve.loadtest.soak``: a server under load and random faults; answers stay right, nothing grows.

    python -m epdserve.loadtest.soak [--minutes 20] [--clients 4] [--fault-every 30] [--seed 1]
        [--json FILE]

Starts its own server, whose store and pages are so small that blocks come and go all the time and the SSD tier is full.
First every conversation is answered once, undisturbed: the reference. Then clients ask for the same conversations in
any order, some leave in the middle, and workers and the store get kill -9 or stand still for some seconds. Every whole
answer must be the reference's text: requests are `exact`, so no hit may change them. A refusal
(429, 503) is an answer while somebody is dead; a stream that ends without saying why is not.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer
from epdserve.loadtest import pools
from epdserve.loadtest.client import Outcome, first_model, new_client, stream_chat
from epdserve.loadtest.server import running_server
from epdserve.loadtest.soak_vitals import History, processes
from epdserve.loadtest.workloads import agent_turns

_SILENCE_S: Final = 120.0
_LOOK_S: Final = 2.0
_EMPTY_S: Final = 90.0
_STOPS: Final = 0.4  # of the faults: the process stands still and goes on; the others are kill -9
_LONGEST_STOP_S: Final = 8.0  # longer than a lease of the registry: it is given up, and wakes up fenced off
_SMALL: Final = """
[machine]
ssd_bytes = 33554432
[prefill.engine]
num_pages = 384
[decode.engine]
num_pages = 384
[store]
host_bytes = 16777216
[store.ssd]
floor_s = 60
"""
_REFUSALS: Final = ("429", "503")


@dataclass(slots=True)
class Report:
    """What the soak saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)  # what answers that are not whole said
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    history: History = field(default_factory=History)
    left_over: dict[str, dict[str, float]] = field(default_factory=dict)

    def problems(self) -> list[str]:
        """What must not be."""
        found = [f"wrong answer: {text}" for text in self.wrong[:3]]
        found += [f"broken answer: {error}" for error in self.broken[:3]]
        found += [f"{worker} still holds {held}" for worker, held in self.left_over.items()]
        if not self.outcomes["whole"]:
            found.append("no answer was whole")
        return found + self.history.problems()


class Soak:
    """One server, its clients and its misfortunes."""

    def __init__(
        self,
        state_file: Path,
        server: Mapping[str, Any],
        bodies: Sequence[dict[str, Any]],
        seed: int,
        fault_every_s: float = 30.0,
    ) -> None:
        self._fault_every_s = fault_every_s
        self._state_file, self._server, self._bodies = state_file, server, bodies
        self._dice = random.Random(seed)
        self._report = Report()
        self._reference: list[str] = []
        self._until = 0.0

    async def run(self, *, seconds: float, clients: int) -> Report:
        """Record the reference, then disturb and compare for so long."""
        async with self._client(clients + 1) as client:
            for body in self._bodies:
                outcome = await stream_chat(client, body)
                if not outcome.ok:
                    raise RuntimeError(f"no reference answer: {outcome.error}")
                self._reference.append(outcome.text)
        self._until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._ask_on(random.Random(f"{number}/{self._dice.random()}")))
            group.create_task(self._trouble())
            group.create_task(self._look())
        await self._empty()
        return self._report

    async def _ask_on(self, dice: random.Random) -> None:
        while time.monotonic() < self._until:
            number = dice.randrange(len(self._bodies))
            patience_s = dice.uniform(0.05, 2.0) if dice.random() < 0.25 else _SILENCE_S
            async with self._client(1) as client:
                asking = asyncio.create_task(stream_chat(client, self._bodies[number]))
                await asyncio.wait([asking], timeout=patience_s)
                if not asking.done():
                    asking.cancel()
                    await asyncio.wait([asking])
                    self._report.outcomes["left"] += 1
                    continue
            self._judge(number, asking.result())
            if not asking.result().ok:
                await asyncio.sleep(0.5)

    def _judge(self, number: int, outcome: Outcome) -> None:
        report = self._report
        if outcome.error is not None:
            report.errors[outcome.error[:80]] += 1
        if outcome.ok:
            report.outcomes["whole"] += 1
            if outcome.text != self._reference[number]:
                report.wrong.append(f"{outcome.text!r} instead of {self._reference[number]!r}")
        elif str(outcome.error).startswith(_REFUSALS):
            report.outcomes["refused"] += 1
        elif outcome.error is not None and outcome.text:
            report.outcomes["ended with an error"] += 1  # said so: the client knows that it has a part only
        elif outcome.error is not None:
            report.outcomes["failed"] += 1
        else:
            report.broken.append(f"a stream ended after {outcome.text!r}")

    async def _trouble(self) -> None:
        while (left_s := self._until - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, self._dice.uniform(0.5, 1.5) * self._fault_every_s))
            if time.monotonic() >= self._until - 10:
                return  # what was killed last has to be back in the end
            victims = {
                name: pid
                for name, pid in processes(self._state_file).items()
                if name not in ("registry", "router")
            }
            if not victims:
                continue
            name = self._dice.choice(sorted(victims))
            with contextlib.suppress(ProcessLookupError):
                await self._hurt(name, victims[name])

    async def _hurt(self, name: str, pid: int) -> None:
        if self._dice.random() < _STOPS:
            os.kill(pid, signal.SIGSTOP)
            self._report.faults[f"stop and go on {name}"] += 1
            await asyncio.sleep(self._dice.uniform(0.5, _LONGEST_STOP_S))
            os.kill(pid, signal.SIGCONT)
        else:
            os.kill(pid, signal.SIGKILL)
            self._report.faults[f"kill -9 {name}"] += 1

    async def _look(self) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
            while time.monotonic() < self._until:
                self._report.history.look(self._state_file)
                await self._report.history.count_missing(json.loads(self._state_file.read_text()), client)
                await asyncio.sleep(_LOOK_S)

    async def _empty(self) -> None:
        """Wait until nothing is held any more; what is left then was leaked."""
        give_up_at = time.monotonic() + _EMPTY_S
        async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
            while True:
                left: dict[str, dict[str, float]] = {}
                for worker, address in pools.addresses(json.loads(self._state_file.read_text())).items():
                    try:
                        samples = await pools.read(client, address)
                        held = pools.busy(samples)
                        if samples.get(pools.LEAKED):
                            held[pools.LEAKED] = samples[pools.LEAKED]
                    except httpx.HTTPError as error:
                        held = {f"no answer: {type(error).__name__}": 1.0}
                    if held:
                        left[worker] = held
                if not left or time.monotonic() > give_up_at:
                    self._report.left_over = left
                    return
                await asyncio.sleep(0.5)

    def _client(self, connections: int) -> httpx.AsyncClient:
        return new_client(self._server["url"], api_key=None, silence_s=_SILENCE_S, connections=connections)


async def _conversations(server: Mapping[str, Any], count: int, seed: int) -> list[dict[str, Any]]:
    async with new_client(server["url"], api_key=None, silence_s=_SILENCE_S, connections=1) as client:
        model = await first_model(client)
    bodies = []
    for number in range(count):
        turns = agent_turns(model, turns=3, words=60, max_tokens=24, seed=seed + number)
        bodies += [{**body, "exact": True} for body in turns]
    return bodies


def main(
    minutes: Annotated[float, typer.Option(min=0.1, help="How long.")] = 20.0,
    clients: Annotated[int, typer.Option(min=1, help="How many ask at a time.")] = 4,
    conversations: Annotated[int, typer.Option(min=1, help="Of three turns each.")] = 6,
    fault_every: Annotated[
        float, typer.Option(min=1.0, help="Seconds between two kills, on average.")
    ] = 30.0,
    seed: Annotated[int, typer.Option(help="Same seed, same questions; faults depend on time as well.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write what was seen here.")] = None,
) -> None:
    """Soak; exit status 1 if an answer was wrong, something grew, or something was left over."""
    with tempfile.TemporaryDirectory(prefix="epdserve-soak-") as name:
        folder = Path(name)
        (folder / "small.toml").write_text(_SMALL)
        arguments = ("--config", str(folder / "small.toml"))
        with running_server(folder / "state", *arguments, threads=1) as server:
            bodies = asyncio.run(_conversations(server, conversations, seed))
            soak = Soak(folder / "state" / "state.json", server, bodies, seed, fault_every)
            report = asyncio.run(soak.run(seconds=60 * minutes, clients=clients))
    print(f"answers: {dict(sorted(report.outcomes.items()))}; faults: {dict(sorted(report.faults.items()))}")
    for error, count in report.errors.most_common():
        print(f"{count} x {error}")
    for line in report.history.rows():
        print(line)
    problems = report.problems()
    for problem in problems:
        print(f"NOT FINE: {problem}")
    if json_file is not None:
        told = {
            "outcomes": report.outcomes,
            "errors": report.errors,
            "faults": report.faults,
            "problems": problems,
        }
        json_file.write_text(json.dumps({**told, "vitals": report.history.rows()}, indent=1))
    raise typer.Exit(int(bool(problems)))


if __name__ == "__main__":
    typer.run(main)
