"""Published ways to choose workers, from their formulas, in our own code; each class names its formula and source.

None of them refuses by itself. Each gets a bound on queued prompt work (``cap_s`` seconds a prefill worker, 0 = none),
as deployments put in front of them, and its search may set it. ``tests/loadtest/simulator/test_baselines.py`` compares
each with numbers worked out by hand.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Final
from zlib import crc32

import numpy as np
import numpy.typing as npt
from epdserve.loadtest.simulator.requests import BLOCK_TOKENS, Request
from epdserve.loadtest.simulator.run import Routed
from epdserve.loadtest.simulator.view import View
from epdserve.loadtest.simulator.workers import Job
from epdserve.services.policy.pools import Floats

Parameters = Mapping[str, float]


class Baseline(ABC):
    """A policy without admission of its own; engines run prompts in order of arrival.

    Args:
        parameters: In place of ``defaults``.
    """

    name: ClassVar[str] = ""
    urgent = False
    defaults: ClassVar[Parameters] = {}
    choices: ClassVar[Mapping[str, tuple[float, ...]]] = {}
    """What the search may try."""

    def __init__(self, parameters: Parameters | None = None, *, seed: int = 0) -> None:
        self.parameters = {"cap_s": 0.0, **self.defaults, **(parameters or {})}
        self.rng = random.Random(f"{self.name} {seed}")
        self.turn = 0

    def route(self, request: Request, view: View, now: float) -> Routed | None:
        """As the subclass chooses, unless too much is queued."""
        cap_s = self.parameters["cap_s"]
        speed = view.cluster.spec.timing.prefill_tokens_per_s
        if cap_s and view.prefill_tokens.sum() > cap_s * speed * len(view.prefill_requests):
            return None
        return self._choose(request, view)

    def again(self, job: Job, view: View, now: float) -> Routed:
        """Chosen like any other; what is lost is not refused."""
        return self._choose(replace(job.request, prompt_tokens=job.prompt_tokens), view)

    def _choose(self, request: Request, view: View) -> Routed:
        self.turn += 1
        hits = view.hits(request)
        prefill = _open(self.prefill(request, view, hits), view.prefill_draining)
        decode = _open(self.decode(request, view), view.decode_draining)
        hit = min(float(hits[3, prefill]), request.prompt_tokens - 1.0)
        return Routed(prefill, decode, request.effort, hit, 512.0)

    def began(self, job: Job, now: float) -> None:  # noqa: B027 - nothing is learnt
        """Nothing is learnt."""

    def finished(self, job: Job, now: float) -> None:  # noqa: B027 - nothing is learnt
        """Nothing is learnt."""

    @abstractmethod
    def prefill(self, request: Request, view: View, hits: Floats) -> int:
        """Prefill worker; ``hits`` as ``View.hits``."""

    @abstractmethod
    def decode(self, request: Request, view: View) -> int:
        """Decode worker."""

    def two(self, loads: Floats) -> int:
        """The less loaded of two."""
        first, second = self.rng.randrange(len(loads)), self.rng.randrange(len(loads))
        return min((first, second), key=lambda index: (loads[index], index))


def _open(index: int, draining: npt.NDArray[np.bool_]) -> int:
    """The worker chosen, or the next one that does not drain; routers offer these to any policy."""
    for step in range(len(draining)):
        at = (index + step) % len(draining)
        if not draining[at]:
            return at
    return index


class RoundRobin(Baseline):
    """In turn: request k to worker k mod n.

    Source: the default of the routers named below (Dynamo 1.2.1, ``--router-mode round_robin``) and of any proxy.
    """

    name: ClassVar[str] = "round robin"

    def prefill(self, request: Request, view: View, hits: Floats) -> int:
        """The next."""
        return self.turn % len(view.prefill_requests)

    def decode(self, request: Request, view: View) -> int:
        """The next."""
        return self.turn % len(view.decode_running)


class PowerOfTwo(Baseline):
    """Two workers are drawn at random, with replacement; the one with fewer requests is taken.

    Source: Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, IEEE TPDS 12 (10), 2001.
    """

    name: ClassVar[str] = "power of two"

    def prefill(self, request: Request, view: View, hits: Floats) -> int:
        """By requests."""
        return self.two(view.prefill_requests)

    def decode(self, request: Request, view: View) -> int:
        """By requests."""
        return self.two(view.decode_running)


class LeastTokens(Baseline):
    """The least tokens in flight: queued prompt tokens for prefill, tokens held for decode.

    Source: join the shortest queue (Gupta et al., Analysis of join-the-shortest-queue routing for web server farms,
    Performance Evaluation 64, 2007), with the work in tokens for the length of a queue.
    """

    name: ClassVar[str] = "least tokens"

    def prefill(self, request: Request, view: View, hits: Floats) -> int:
        """By queued tokens."""
        return int(np.argmin(view.prefill_tokens.sum(axis=0)))

    def decode(self, request: Request, view: View) -> int:
        """By tokens held."""
        return int(np.argmin(view.decode_held))


class SessionAffinity(Baseline):
    """Worker ``hash(session) mod n``, whatever its load.

    Source: sticky sessions as in any HTTP proxy (nginx ``hash $key``; consistency matters only when workers change,
    which they do not in the comparison).
    """

    name: ClassVar[str] = "session affinity"

    def prefill(self, request: Request, view: View, hits: Floats) -> int:
        """Always the same."""
        return crc32(b"p%d" % request.session) % len(view.prefill_requests)

    def decode(self, request: Request, view: View) -> int:
        """Always the same."""
        return crc32(b"d%d" % request.session) % len(view.decode_running)


class Dynamo(Baseline):
    """The cost of Dynamo's KV router: the lowest wins, or a softmax draw over costs with a temperature.

    ``prefill_blocks - credit * overlap_blocks + decode_blocks``; prefill blocks are those queued at the worker and
    those of the prompt, overlap in host memory counts ``host_weight`` times. When disaggregated, prefill workers are
    chosen by the first two terms and decode workers by the last. Costs are taken over their spread before the draw.

    Source: NVIDIA Dynamo 1.2.1, docs.nvidia.com/dynamo/v1.2.1/components/router/, pages "Routing Concepts" and
    "Configuration and Tuning" (``--router-kv-overlap-score-credit`` 1, ``--router-host-cache-hit-weight`` 0.75,
    ``--router-temperature`` 0 by default). Weights above 1, which older versions allowed, may be searched.
    """

    name: ClassVar[str] = "Dynamo cost"
    defaults: ClassVar[Parameters] = {"overlap_weight": 1.0, "temperature": 0.0, "host_weight": 0.75}
    choices: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "overlap_weight": (0.3, 1.0, 3.0),
        "temperature": (0.0, 0.3),
        "host_weight": (0.0, 0.75, 1.0),
    }

    def prefill(self, request: Request, view: View, hits: Floats) -> int:
        """Blocks to compute, there and for this prompt, less the weighted overlap."""
        lower = self.parameters["host_weight"]
        credit = self.parameters["overlap_weight"] * (hits[0] + lower * np.maximum(0.0, hits[2] - hits[0]))
        blocks = (view.prefill_tokens.sum(axis=0) + request.prompt_tokens - credit) / BLOCK_TOKENS
        return self._draw(blocks)

    def decode(self, request: Request, view: View) -> int:
        """Active blocks."""
        return self._draw((view.decode_held + request.prompt_tokens) / BLOCK_TOKENS)

    def _draw(self, costs: Floats) -> int:
        temperature = self.parameters["temperature"]
        if temperature <= 0:
            return int(np.argmin(costs))
        spread = float(np.ptp(costs)) or 1.0
        weights = np.exp(-(costs - costs.min()) / spread / temperature)
        return self.rng.choices(range(len(costs)), weights.tolist())[0]


class SGLang(Baseline):
    """The thresholds of SGLang's cache-aware policy.

    Out of balance, ``max - min > abs_threshold`` and ``max > rel_threshold * min`` (requests in flight), the shortest
    queue; else the longest match if it exceeds ``cache_threshold`` of the prompt, else the least loaded. Decode workers
    by power of two, as its disaggregated mode has by default.

    Source: github.com/sgl-project/sglang, gateway 0.3.1 (once ``sgl-router``), head of
    ``src/policies/cache_aware.rs``; defaults 0.3, 64 and 1.5 of its command line.
    """

    name: ClassVar[str] = "SGLang cache aware"
    defaults: ClassVar[Parameters] = {"cache_threshold": 0.3, "abs_threshold": 64.0, "rel_threshold": 1.5}
    choices: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "cache_threshold": (0.1, 0.3, 0.6),
        "abs_threshold": (4.0, 16.0, 64.0),
        "rel_threshold": (1.1, 1.5),
    }

    def prefill(self, request: Request, view: View, hits: Floats) -> int:
        """Shortest queue when out of balance, else the longest match, else the least loaded."""
        loads = view.prefill_requests
        most, least = float(loads.max()), float(loads.min())
        if (
            most - least > self.parameters["abs_threshold"]
            and most > self.parameters["rel_threshold"] * least
        ):
            return int(np.argmin(loads))
        best = int(np.argmax(hits[0]))
        if hits[0, best] / request.prompt_tokens > self.parameters["cache_threshold"]:
            return best
        return int(np.argmin(loads))

    def decode(self, request: Request, view: View) -> int:
        """Power of two."""
        return self.two(view.decode_running)


class LlmD(Baseline):
    """The weighted scorers of llm-d's endpoint picker: the highest sum of weight times score, each score in 0..1.

    Prefix: share of the prompt's blocks that are cached there. Queue: ``(max - q) / (max - min)`` over candidates, 1
    if all are equal. KV memory: ``1 - used``. Decode workers are scored without the prefix.

    Source: llm-d 0.8, llm-d.ai/docs/0.8/architecture/core/router/epp/scheduling (filter, score, pick; scorers
    ``prefix-cache``, ``queue``, ``kv-cache-utilization``); default weights 3, 2 and 2.
    """

    name: ClassVar[str] = "llm-d scorers"
    defaults: ClassVar[Parameters] = {"prefix": 3.0, "queue": 2.0, "memory": 2.0}
    choices: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "prefix": (0.5, 1.0, 3.0),
        "queue": (2.0, 4.0),
        "memory": (0.0, 2.0),
    }

    def prefill(self, request: Request, view: View, hits: Floats) -> int:
        """Prefix and queue; a prefill worker's pages are cache, so all are as full."""
        prefix = self.parameters["prefix"] * hits[0] / request.prompt_tokens
        return int(np.argmax(prefix + self.parameters["queue"] * _idle(view.prefill_requests)))

    def decode(self, request: Request, view: View) -> int:
        """Queue and memory."""
        total = view.cluster.spec.decode_tokens
        memory = self.parameters["memory"] * (1 - view.decode_held / total)
        return int(np.argmax(memory + self.parameters["queue"] * _idle(view.decode_running)))


def _idle(queue: Floats) -> Floats:
    spread = float(np.ptp(queue))
    if math.isclose(spread, 0.0):
        return np.ones(len(queue))
    return np.asarray((queue.max() - queue) / spread)


BASELINES: Final[tuple[type[Baseline], ...]] = (
    RoundRobin,
    PowerOfTwo,
    LeastTokens,
    SessionAffinity,
    Dynamo,
    SGLang,
    LlmD,
)
CAPS_S: Final = (0.0, 0.5, 1.0, 1.5, 2.5)
