"""From the cluster's snapshot and a prompt to a route: which prefill worker, which decode worker."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from epdserve.kvstore.hashing import ImageDigest, prefix_hash_chain
from epdserve.services.errors import Unavailable
from epdserve.services.policy.forecast import LengthForecast
from epdserve.services.policy.gate import SloClass
from epdserve.services.policy.joint import Candidate, Decision, Placing, place
from epdserve.services.policy.settings import USUAL, PolicySettings
from epdserve.services.router.cluster import Cluster
from epdserve.services.router.estimates import KV_BYTES_PER_TOKEN, Estimates
from epdserve.services.router.fleets import Fleets, Life
from epdserve.services.router.ledger import InFlightLedger
from epdserve.services.router.snapshot import Fleet
from epdserve.services.types import TokenIds, WorkerInfo, WorkerRole

_IN_THREAD_ABOVE_TOKENS: Final = 16_384
# Heartbeats and other routers' words are about so old
_STALENESS_S: Final = 0.5
# Requests whose placement can be explained afterwards
_EXPLAINED: Final = 512


@dataclass(frozen=True, slots=True)
class Targets:
    """What requests are meant to see; placement weighs the first token and the others by these."""

    ttft_s: float = 2.0
    tpot_s: float = 0.05


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes, and how much of it is already there.

    Attributes:
        hit_tokens: Expected hit at the prefill worker, in its pages or from a store.
        decide: Works out why; None for a route that nobody chose.
    """

    prefill: WorkerInfo
    decode: WorkerInfo
    hit_tokens: int
    decide: Callable[[], Decision] | None = None

    @property
    def decision(self) -> Decision | None:
        """Why; of a pair that was the only one, what is expected of it now."""
        return None if self.decide is None else self.decide()


@dataclass(frozen=True, slots=True)
class _Choice:
    """Of one layout: the workers that may take a request.

    Attributes:
        hits: Leading tokens of the prompt that each worker and store holds.
    """

    fleet: Fleet
    hits: Mapping[str, int]
    wanted: Placing


class Placer:
    """Places prompts by prefix hits and loads. Owned by the event loop.

    Attributes:
        placed_at: Event loop time at which there last were workers for a prompt.
    """

    def __init__(
        self,
        cluster: Cluster,
        ledger: InFlightLedger,
        *,
        model_name: str = "",
        estimates: Estimates | None = None,
        targets: Targets = Targets(),
        in_turn: bool = False,
        policy: PolicySettings = USUAL,
    ) -> None:
        """A placer.

        Args:
            policy: Of placement; of the estimates, too, unless they are given.
            in_turn: Workers take requests one after the other, whatever they hold: what placement is compared with.
        """
        self._in_turn = in_turn
        self._turns = 0
        self._cluster = cluster
        self.ledger = ledger
        self._targets = targets
        self._policy = policy
        self.estimates = estimates if estimates is not None else Estimates(policy=policy)
        self._fleets = Fleets(cluster, ledger, self.estimates, model_name=model_name)
        self._explained: OrderedDict[str, Route] = OrderedDict()
        self._names: OrderedDict[str, str] = OrderedDict()
        self.placed_at = float("-inf")

    def prepare(self) -> None:
        """Make what decisions need of the view, if it is another one by now; else the next decision would."""
        self._fleets.prepare()

    def ready(self, role: WorkerRole, avoid: Collection[Life] = ()) -> list[WorkerInfo]:
        """Workers of a role that take work, without the lives in ``avoid``."""
        return self._fleets.ready(role, avoid)

    def max_context_tokens(self) -> int | None:
        """Longest context that every ready worker takes, None without workers."""
        return self._fleets.max_context_tokens()

    async def place(
        self,
        tokens: TokenIds,
        *,
        tenant_key: bytes,
        forecast: LengthForecast,
        request_id: str = "",
        avoid: Collection[Life] = (),
        images: Sequence[ImageDigest] = (),
        targets: Targets | SloClass | None = None,
        deterministic: bool = False,
        root: bytes = b"",
    ) -> Route:
        """Choose a pair of workers for a prompt.

        Args:
            tokens: The prompt.
            forecast: What the answer is expected to take.
            request_id: Spreads requests over equals while other routers' loads are not known exactly.
            avoid: Lives of workers that were lost under this request.
            images: Of the prompt; they enter the names of its blocks.
            targets: What the request was promised; None = as all are.
            deterministic: Workers of one back end, and blocks of deterministic requests, are wanted.
            root: Only workers of this root; empty = of any.

        Raises:
            Unavailable: No pair of ready workers with one layout.
        """
        fleets = self._fleets.of(avoid, deterministic=deterministic)
        if root:
            fleets = {layout: fleet for layout, fleet in fleets.items() if layout[0] == root}
        if not fleets:
            missing = self._fleets.missing(avoid)
            raise Unavailable(f"no {missing} worker is ready", retry_after_s=1.0)
        aimed = targets or self._targets
        routes = []
        for layout, fleet in fleets.items():
            affinity, hits = await self._hit_tokens(layout, tokens, tenant_key, images)
            wanted = Placing(
                request_id,
                len(tokens),
                forecast,
                aimed.ttft_s,
                aimed.tpot_s,
                KV_BYTES_PER_TOKEN,
                # Whether a tail will spare the window's rows is the worker's to know; all candidates are alike
                rerun_tokens=0,
                affinity=affinity,
                staleness_s=0.0 if self.ledger.alone else _STALENESS_S,
            )
            choice = _Choice(fleet, hits, wanted)
            routes.append(self._only(choice) or self._choose(choice))
        route = routes[0] if len(routes) == 1 else min(routes, key=_cost)
        self.placed_at = asyncio.get_running_loop().time()
        self._remember(request_id, route)
        return route

    def explain(self, request_id: str) -> list[Candidate] | None:
        """The pairs that were compared for a request, cheapest first; None if it is not remembered.

        Args:
            request_id: As placed, or as its caller knows it.
        """
        route = self._explained.get(request_id) or self._explained.get(self._names.get(request_id, ""))
        return None if route is None or route.decision is None else route.decision.explain()

    def call(self, request_id: str, name: str) -> None:
        """Let a request be found under its caller's name for it, too; of two the later one is."""
        self._names[name] = request_id
        self._names.move_to_end(name)
        if len(self._names) > _EXPLAINED:
            self._names.popitem(last=False)

    def _remember(self, request_id: str, route: Route) -> None:
        self._explained[request_id] = route
        self._explained.move_to_end(request_id)
        if len(self._explained) > _EXPLAINED:
            self._explained.popitem(last=False)

    def _only(self, choice: _Choice) -> Route | None:
        """The route where there is nothing to weigh: one pair, and no tier that has more than the worker's pages."""
        if len(choice.fleet.prefills) > 1 or len(choice.fleet.decodes) > 1:
            return None
        (prefill,), (decode,) = choice.fleet.prefills, choice.fleet.decodes
        own = choice.hits.get(prefill.worker, 0)
        if max(choice.hits.values(), default=0) > own:
            return None
        return Route(prefill, decode, min(own, choice.wanted.prompt_tokens - 1), lambda: self._decide(choice))

    def _choose(self, choice: _Choice) -> Route:
        """The best pair of one layout, or the next one."""
        if self._in_turn:
            return self._next(choice)
        decision = self._decide(choice)
        chosen, by_name = decision.chosen, choice.fleet.by_name
        return Route(by_name[chosen.prefill], by_name[chosen.decode], chosen.hit_tokens, lambda: decision)

    def _next(self, choice: _Choice) -> Route:
        prefills, decodes = choice.fleet.prefills, choice.fleet.decodes
        prefill, decode = prefills[self._turns % len(prefills)], decodes[self._turns % len(decodes)]
        self._turns += 1
        held = choice.hits.get(prefill.worker, 0)
        return Route(
            prefill, decode, min(held, choice.wanted.prompt_tokens - 1), lambda: self._decide(choice)
        )

    def _decide(self, choice: _Choice) -> Decision:
        prefills, decodes = choice.fleet.pools(choice.hits)
        return place(prefills, decodes, self.estimates.handoffs.links, choice.wanted, self._policy.placement)

    async def _hit_tokens(
        self,
        layout: tuple[bytes, int],
        tokens: TokenIds,
        tenant_key: bytes,
        images: Sequence[ImageDigest],
    ) -> tuple[bytes, dict[str, int]]:
        """The prompt's first block in a layout of the pool, and leading tokens that each worker and store holds."""
        root, block_tokens = layout
        if len(tokens) < block_tokens:
            return b"", {}
        hashes = await self._chain(tokens, root, block_tokens, tenant_key, images)
        if not hashes:
            return b"", {}
        found = self._cluster.hits(hashes)
        return hashes[0], {worker: blocks * block_tokens for worker, blocks in found.items()}

    async def _chain(
        self,
        tokens: TokenIds,
        root: bytes,
        block_tokens: int,
        tenant_key: bytes,
        images: Sequence[ImageDigest],
    ) -> Sequence[bytes]:
        def compute() -> Sequence[bytes]:
            return prefix_hash_chain(
                tokens, block_tokens=block_tokens, root=root, tenant_key=tenant_key, image_digests=images
            )

        if len(tokens) > _IN_THREAD_ABOVE_TOKENS:
            return await asyncio.to_thread(compute)
        return compute()


def _cost(route: Route) -> tuple[float, str]:
    """What the routes of several layouts are sorted by."""
    assert route.decision is not None
    return route.decision.chosen.cost, route.prefill.worker
