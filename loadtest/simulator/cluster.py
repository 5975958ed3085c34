"""The simulated cluster: frozen before any policy was tuned on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from epdserve.loadtest.simulator.caches import Caches
from epdserve.loadtest.simulator.hardware import KV_BYTES_PER_TOKEN, TAIL_BYTES, WINDOW, Timing
from epdserve.loadtest.simulator.workers import DecodeWorker, Job, PrefillWorker


@dataclass(frozen=True, slots=True)
class Fault:
    """From ``at_s`` to ``until_s`` a worker of a role is slower by a factor, drains, or is dead.

    A dead worker's requests go on elsewhere as the router's pipeline has them do; its pages are lost.
    """

    role: str
    worker: int
    at_s: float
    until_s: float
    slowness: float = 1.0
    drains: bool = False
    dies: bool = False


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What the cluster is made of; two workers to a machine, decode workers spread over the machines.

    Attributes:
        heartbeat_s: Loads that routers know are up to so old, but for their own requests since.
        lease_s: So long after its death routers still take a worker for alive, but for requests that were lost with it.
        routers: They share the arrivals in turn, and know nothing of each other between heartbeats.
    """

    prefills: int = 5
    decodes: int = 3
    timing: Timing = field(default_factory=Timing)
    pages_tokens: int = 4_000_000
    host_tokens: int = 20_000_000
    decode_tokens: int = 240_000_000
    heartbeat_s: float = 0.25
    routers: int = 2
    faults: tuple[Fault, ...] = ()
    lease_s: float = 5.0

    @property
    def machine_count(self) -> int:
        """Machines."""
        return (self.prefills + self.decodes + 1) // 2

    def machines(self) -> tuple[list[int], list[int]]:
        """Machine of each prefill and of each decode worker."""
        return (
            [self.machine_count - 1 - index % self.machine_count for index in range(self.prefills)],
            [index % self.machine_count for index in range(self.decodes)],
        )


class Cluster:
    """Workers and caches at one moment of virtual time."""

    def __init__(self, spec: ClusterSpec, *, urgent: bool) -> None:
        self.spec = spec
        self.prefill_machines, self.decode_machines = spec.machines()
        self.caches = Caches(
            self.prefill_machines,
            spec.machine_count,
            pages_tokens=spec.pages_tokens,
            host_tokens=spec.host_tokens,
        )
        self.prefills = [PrefillWorker(index, spec.timing, urgent=urgent) for index in range(spec.prefills)]
        self.decodes = [
            DecodeWorker(index, spec.timing, total_tokens=spec.decode_tokens) for index in range(spec.decodes)
        ]
        self.tier_tokens = dict.fromkeys(("pages", "host", "ssd", "peers"), 0.0)
        self.prompt_tokens = 0.0

    def start_prefill(self, job: Job) -> None:
        """Settle what is fetched and what is computed, by what is true now: the soonest of the tiers."""
        hits = self.caches.hits_at(job.prefill, job.request.blocks)
        best, job.left_tokens, job.fetch_s, job.hit_tokens = self._cheapest(job.prompt_tokens, hits)
        self.prompt_tokens += job.prompt_tokens
        before = 0.0
        for tier, name in enumerate(self.tier_tokens):
            if tier <= best:
                self.tier_tokens[name] += max(0.0, min(hits[tier], job.hit_tokens) - before)
                before = max(before, min(hits[tier], job.hit_tokens))

    def transfer_s(self, job: Job) -> float:
        """Seconds of the hand-off to the decode worker."""
        timing = self.spec.timing
        same = self.prefill_machines[job.prefill] == self.decode_machines[job.decode]
        speed = timing.same_machine_bytes_per_s if same else timing.other_machine_bytes_per_s
        moved = job.prompt_tokens * KV_BYTES_PER_TOKEN + TAIL_BYTES
        return timing.link_latency_s + moved / speed

    def set_fault(self, fault: Fault, *, on: bool) -> None:
        """A fault begins or ends."""
        worker = self.worker(fault)
        worker.slowness, worker.draining = (fault.slowness, fault.drains) if on else (1.0, False)

    def fell(self, fault: Fault, now: float) -> list[Job]:
        """A worker dies; the requests that were lost with it."""
        worker = self.worker(fault)
        worker.died_at = now
        worker.life += 1
        if isinstance(worker, PrefillWorker):
            self.caches.forget(worker.index)
        return worker.lose(now)

    def rose(self, fault: Fault) -> None:
        """Its next life begins."""
        self.worker(fault).died_at = None

    def worker(self, fault: Fault) -> PrefillWorker | DecodeWorker:
        """Whose fault it is."""
        return (self.prefills if fault.role == "prefill" else self.decodes)[fault.worker]

    def _cheapest(self, prompt_tokens: int, hits: Sequence[float]) -> tuple[int, float, float, float]:
        timing = self.spec.timing
        best = (0.0, 0, float(prompt_tokens), 0.0, 0.0)
        fetch_s, before = 0.0, float(hits[0])
        for tier in range(4):
            hit = min(float(hits[tier]), prompt_tokens - 1.0)
            fetch_s += max(0.0, hit - before) * KV_BYTES_PER_TOKEN / timing.tier_bytes_per_s[tier]
            before = max(before, hit)
            useful = hit - WINDOW if hit > WINDOW else 0.0
            left = prompt_tokens - useful
            cost = fetch_s + left / timing.prefill_tokens_per_s
            if tier == 0 or cost < best[0]:
                best = (cost, tier, left, fetch_s, hit if useful else 0.0)
        return best[1:]
