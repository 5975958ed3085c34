"""Carries a plan out: the load of each phase, the faults at their times, and what came of all requests."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from epdserve.loadtest.chaos.cluster import Cluster
from epdserve.loadtest.chaos.disks import empty, fill, throttle
from epdserve.loadtest.chaos.judge import Asked, Verdict, judge, phase_at
from epdserve.loadtest.chaos.plan import Fault, Plan, What
from epdserve.loadtest.client import Outcome, first_model, new_client, stream_chat
from epdserve.loadtest.results.record import Ending, Record, ending_of, facts_of
from epdserve.loadtest.workloads import agent_turns

_SILENCE_S: Final = 60.0
_EMPTY_S: Final = 60.0
_SETTLE_S: Final = 30.0
_SLOW_BYTES_PER_S: Final = 256 * 1024


@dataclass(slots=True)
class Run:
    """What one run saw."""

    peak_per_s: float = 0.0
    asked: list[Asked] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)


class Drive:
    """One plan on one cluster. Owned by one event loop.

    Args:
        say: Told what happens, in lines.
    """

    def __init__(self, plan: Plan, cluster: Cluster, say: Callable[[str], None]) -> None:
        self._plan, self._cluster, self._say = plan, cluster, say
        self._bodies: list[dict[str, Any]] = []
        self._reference: list[str] = []
        self._run = Run()
        self._started_at = 0.0

    async def run(self) -> Run:
        """Reference, peak, phases with their faults, and the judgement.

        Raises:
            RuntimeError: There is no reference, or a fault cannot be done here.
        """
        await self._record_reference()
        self._run.peak_per_s = self._plan.load.rate or await self._measure_peak()
        self._say(f"peak: {self._run.peak_per_s:.2f} requests/s")
        self._started_at = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for at_s, number in self._arrivals():
                group.create_task(self._ask_at(at_s, number))
            for fault in self._plan.faults:
                group.create_task(self._do(fault))
        left_over = await self._empty()
        self._run.asked.sort(key=lambda one: one.record.at_s)
        self._run.verdict = judge(self._plan, self._run.asked, left_over)
        self._run.verdict.problems += [f"not done: {note}" for note in self._run.notes]
        return self._run

    # -- load -----------------------------------------------------------------------------------------------

    async def _record_reference(self) -> None:
        load = self._plan.load
        async with new_client(self._cluster.url, api_key=None, silence_s=_SILENCE_S, connections=1) as client:
            model = await first_model(client)
        for number in range(load.conversations):
            turns = agent_turns(
                model,
                turns=2,
                words=load.prompt_words,
                max_tokens=load.answer_tokens,
                seed=self._plan.seed + number,
            )
            self._bodies += [{**body, "exact": True} for body in turns]
        for body in self._bodies:
            outcome = await self._ask(body)
            if not outcome.ok:
                raise RuntimeError(f"no reference answer: {outcome.error}")
            self._reference.append(outcome.text)

    async def _measure_peak(self) -> float:
        """Answers a second while a few clients ask without a pause."""
        until, whole = time.monotonic() + self._plan.load.peak_s, 0

        async def ask_on(draw: random.Random) -> None:
            nonlocal whole
            while time.monotonic() < until:
                outcome = await self._ask(draw.choice(self._bodies))
                whole += outcome.ok and time.monotonic() < until

        async with asyncio.TaskGroup() as group:
            for number in range(self._plan.load.peak_clients):
                group.create_task(ask_on(random.Random(f"{self._plan.seed}/peak/{number}")))
        return max(0.1, whole / self._plan.load.peak_s)

    def _arrivals(self) -> list[tuple[float, int]]:
        """Time and body of each request: independent customers, phase by phase."""
        draw, found, start = random.Random(self._plan.seed), [], 0.0
        for phase in self._plan.phases:
            rate, now = phase.load * self._run.peak_per_s, start
            while rate > 0 and (now := now + draw.expovariate(rate)) < start + phase.seconds:
                found.append((now, draw.randrange(len(self._bodies))))
            start += phase.seconds
        return found

    async def _ask_at(self, at_s: float, number: int) -> None:
        due_at = self._started_at + at_s
        await asyncio.sleep(max(0.0, due_at - time.monotonic()))
        outcome = await self._ask(self._bodies[number])
        ending = ending_of(outcome, left=False)
        record = Record(
            kind="chaos",
            tenant=0,
            turn=number % 2,
            at_s=outcome.sent_at - self._started_at,
            late_s=max(0.0, outcome.sent_at - due_at),
            ending=ending,
            expected=ending is Ending.OK
            or (ending is Ending.REFUSED and phase_at(self._plan, at_s).refusals),
            wanted_prompt=None,
            wanted_answer=self._plan.load.answer_tokens,
            **facts_of(outcome),
        )
        right = not outcome.ok or outcome.text == self._reference[number]
        self._run.asked.append(Asked(record, right))

    async def _ask(self, body: dict[str, Any]) -> Outcome:
        async with new_client(self._cluster.url, api_key=None, silence_s=_SILENCE_S, connections=1) as client:
            return await stream_chat(client, body)

    # -- faults ---------------------------------------------------------------------------------------------

    async def _do(self, fault: Fault) -> None:
        await asyncio.sleep(max(0.0, self._started_at + fault.at_s - time.monotonic()))
        self._say(f"{fault.at_s:6.1f} s  {fault.what.value} {fault.target} {fault.lasts_s or '':}".rstrip())
        try:
            await self._happen(fault)
        except (RuntimeError, OSError) as error:
            self._run.notes.append(f"{fault.what.value} {fault.target}: {error}")

    async def _happen(self, fault: Fault) -> None:
        cluster = self._cluster
        match fault.what:
            case What.KILL:
                cluster.processes[fault.target].send(signal.SIGKILL)
            case What.TERMINATE:
                cluster.processes[fault.target].send(signal.SIGTERM)
            case What.STOP:
                process = cluster.processes[fault.target]
                process.send(signal.SIGSTOP)
                await asyncio.sleep(fault.lasts_s)
                process.send(signal.SIGCONT)
            case What.REDIS:
                await asyncio.to_thread(cluster.stop_registry)
                await asyncio.sleep(fault.lasts_s)
                await asyncio.to_thread(cluster.start_registry)
            case What.DISK_FULL:
                taken = await asyncio.to_thread(fill, cluster.drives[-1])
                self._say(f"          {taken} bytes were left on the drive")
                await asyncio.sleep(fault.lasts_s)
                await asyncio.to_thread(empty, cluster.drives[-1])
            case What.SLOW_DISK:
                store = cluster.processes["store-0"].pid
                with throttle(store, cluster.drives[0], bytes_per_s=_SLOW_BYTES_PER_S):
                    await asyncio.sleep(fault.lasts_s)
            case What.CUT:
                await asyncio.to_thread(cluster.network.cut, True)
                await asyncio.sleep(fault.lasts_s)
                await asyncio.to_thread(cluster.network.cut, False)

    async def _empty(self) -> dict[str, dict[str, float]]:
        """Wait until all are back and nothing is held; what is held then was leaked."""
        give_up_at = time.monotonic() + _SETTLE_S
        while not await self._cluster.ready() and time.monotonic() < give_up_at:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        give_up_at = time.monotonic() + _EMPTY_S
        held: dict[str, dict[str, float]] = {}
        while time.monotonic() < give_up_at:
            if not (held := await self._cluster.held()):
                break
            await asyncio.sleep(0.3)
        return held


async def carry_out(plan: Plan, cluster: Cluster, say: Callable[[str], None]) -> Run:
    """Start the cluster, drive, stop.

    Raises:
        NotStartedError, RuntimeError: It cannot be done here.
    """
    try:
        await cluster.start()
        return await Drive(plan, cluster, say).run()
    finally:
        with contextlib.suppress(ProcessLookupError):
            await cluster.stop()


def records_of(asked: Sequence[Asked]) -> tuple[Record, ...]:
    """For a report."""
    return tuple(one.record for one in asked)
