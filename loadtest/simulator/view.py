"""What a router knows: loads as of the last heartbeat, plus what it has sent since."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from epdserve.loadtest.simulator.cluster import Cluster
from epdserve.loadtest.simulator.requests import Request
from epdserve.loadtest.simulator.workers import DecodeWorker, PrefillWorker
from epdserve.services.policy.health import faded

SIZES = 24
"""Classes of prompts by tokens left: powers of two."""


def size_of(tokens: float) -> int:
    """Class of a prompt with so many tokens left."""
    return min(SIZES - 1, max(0, int(tokens)).bit_length())


class View:
    """One router's knowledge; the same for every policy."""

    def __init__(self, cluster: Cluster) -> None:
        prefills, decodes = cluster.spec.prefills, cluster.spec.decodes
        self.cluster = cluster
        self.refreshed_at = 0.0
        self.prefill_tokens = np.zeros((SIZES, prefills))
        self.prefill_requests = np.zeros(prefills)
        self.prefill_slowness = np.ones(prefills)
        self.prefill_draining = np.zeros(prefills, dtype=np.bool_)
        self.decode_draining = np.zeros(decodes, dtype=np.bool_)
        # Calls of this router, and those of them that failed: both fade
        self.calls = {"prefill": np.zeros(prefills), "decode": np.zeros(decodes)}
        self.failures = {"prefill": np.zeros(prefills), "decode": np.zeros(decodes)}
        self.decode_running = np.zeros(decodes)
        self.decode_held = np.zeros(decodes)
        self.decode_remaining = np.zeros(decodes)
        self.decode_step_s = np.full(decodes, cluster.spec.timing.decode_s(1, 0))

    def hits(self, request: Request) -> npt.NDArray[np.float64]:
        """(tiers, prefill workers): leading tokens of the prompt, as the block index has them."""
        return self.cluster.caches.hits(request.blocks)

    def sent(
        self, prefill: int, decode: int, *, compute_tokens: float, prompt_tokens: int, expected: float
    ) -> None:
        """Count an own request."""
        self.calls["prefill"][prefill] += 1
        self.calls["decode"][decode] += 1
        self.prefill_tokens[size_of(compute_tokens), prefill] += compute_tokens
        self.prefill_requests[prefill] += 1
        self.decode_running[decode] += 1
        self.decode_held[decode] += prompt_tokens
        self.decode_remaining[decode] += expected

    def failed(self, role: str, worker: int) -> None:
        """A call to a worker has failed."""
        self.failures[role][worker] += 1

    @contextmanager
    def without(self, workers: Collection[tuple[str, int]]) -> Iterator[None]:
        """Some are as good as draining until the block ends: for a request that was lost with them."""
        open_to_all = self.prefill_draining, self.decode_draining
        self.prefill_draining, self.decode_draining = (mask.copy() for mask in open_to_all)
        for role, worker in workers:
            (self.prefill_draining if role == "prefill" else self.decode_draining)[worker] = True
        yield
        self.prefill_draining, self.decode_draining = open_to_all

    def _closed(self, worker: PrefillWorker | DecodeWorker, now: float) -> bool:
        """Draining, or dead for longer than its lease."""
        died_at = worker.died_at
        return worker.draining or (died_at is not None and now - died_at >= self.cluster.spec.lease_s)

    def refresh(self, now: float) -> None:
        """A heartbeat: the loads are true for a moment. The dead send none: what was known of them stays."""
        for counts in (*self.calls.values(), *self.failures.values()):
            counts *= faded(1.0, elapsed_s=now - self.refreshed_at)
        self.refreshed_at = now
        cluster = self.cluster
        dead_p = [worker.index for worker in cluster.prefills if worker.died_at is not None]
        dead_d = [worker.index for worker in cluster.decodes if worker.died_at is not None]
        stale_p = self.prefill_tokens[:, dead_p], self.prefill_requests[dead_p]
        stale_d = self.decode_running[dead_d], self.decode_held[dead_d], self.decode_remaining[dead_d]
        self.prefill_tokens[:] = 0.0
        coming_running = np.zeros(len(cluster.decodes))
        coming_held = np.zeros(len(cluster.decodes))
        coming_expected = np.zeros(len(cluster.decodes))
        for worker in cluster.prefills:
            self.prefill_requests[worker.index] = len(worker.jobs)
            self.prefill_slowness[worker.index] = worker.slowness
            self.prefill_draining[worker.index] = self._closed(worker, now)
            for job in worker.jobs:
                left = job.left_tokens if job.left_tokens >= 0 else job.prompt_tokens - job.hit_tokens
                self.prefill_tokens[size_of(left), worker.index] += left
                coming_running[job.decode] += 1
                coming_held[job.decode] += job.prompt_tokens
                coming_expected[job.decode] += job.expected_tokens
        for decode in cluster.decodes:
            decode.advance(now)
            index = decode.index
            self.decode_draining[index] = self._closed(decode, now)
            self.decode_running[index] = decode.running + len(decode.waiting)
            self.decode_held[index] = decode.held_tokens
            self.decode_remaining[index] = decode.remaining_tokens
            self.decode_step_s[index] = decode.step_s
        self.decode_running += coming_running
        self.decode_held += coming_held
        self.decode_remaining += coming_expected
        if dead_p or dead_d:
            self.prefill_tokens[:, dead_p], self.prefill_requests[dead_p] = stale_p
            self.decode_running[dead_d], self.decode_held[dead_d], self.decode_remaining[dead_d] = stale_d
