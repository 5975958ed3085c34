"""From the cluster's snapshot and a prompt to a route: which prefill worker, which decode worker."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from epdserve.kvstore.hashing import prefix_hash_chain
from epdserve.services.errors import Unavailable
from epdserve.services.policy.placement import DecodeLoad, PrefillLoad, choose_decode, choose_prefill
from epdserve.services.router.cluster import Cluster
from epdserve.services.router.ledger import InFlightLedger
from epdserve.services.types import TokenIds, WorkerInfo, WorkerRole, WorkerState

# One life of a worker: its replacement under the same name is another one
Life: TypeAlias = tuple[str, str]

_IN_THREAD_ABOVE_TOKENS: Final = 16_384


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes, and how much of it is already there.

    Attributes:
        hit_tokens: Expected hit at the prefill worker, in its pages or from the store of its machine.
    """

    prefill: WorkerInfo
    decode: WorkerInfo
    hit_tokens: int


class Placer:
    """Places prompts by prefix hits and loads. Owned by the event loop."""

    def __init__(self, cluster: Cluster, ledger: InFlightLedger, *, model_name: str = "") -> None:
        self._cluster = cluster
        self._ledger = ledger
        self._model_name = model_name

    def ready(self, role: WorkerRole, avoid: Collection[Life] = ()) -> list[WorkerInfo]:
        """Workers of a role that take work, without the lives in ``avoid``."""
        return [
            info
            for info in self._cluster.workers()
            if info.role is role
            and info.state is WorkerState.READY
            and (info.worker, info.incarnation) not in avoid
            and (not self._model_name or info.model_name == self._model_name)
        ]

    def max_context_tokens(self) -> int | None:
        """Longest context that every ready worker takes, None without workers."""
        infos = [*self.ready(WorkerRole.PREFILL), *self.ready(WorkerRole.DECODE)]
        return min((info.max_context_tokens for info in infos), default=None)

    async def place(
        self, tokens: TokenIds, *, tenant_key: bytes, expected_tokens: int, avoid: Collection[Life] = ()
    ) -> Route:
        """Choose workers for a prompt.

        Args:
            tokens: The prompt.
            expected_tokens: What the answer is expected to take.
            avoid: Lives of workers that were lost under this request.

        Raises:
            Unavailable: No pair of ready workers with one layout.
        """
        prefills = self.ready(WorkerRole.PREFILL, avoid)
        decodes = self.ready(WorkerRole.DECODE, avoid)
        roots = {info.cache_root for info in prefills} & {info.cache_root for info in decodes}
        if not roots:
            missing = (
                "prefill" if not prefills else "decode" if not decodes else "matching prefill and decode"
            )
            raise Unavailable(f"no {missing} worker is ready", retry_after_s=1.0)
        prefills = [info for info in prefills if info.cache_root in roots]
        hits = await self._hit_tokens(prefills, tokens, tenant_key)
        stores = {info.machine: info.worker for info in self.ready(WorkerRole.STORE, avoid)}
        loads = [self._prefill_load(info, hits[_layout(info)], stores, len(tokens)) for info in prefills]
        name = choose_prefill(loads, prompt_tokens=len(tokens))
        reach = next(load.reach_tokens for load in loads if load.worker == name)
        prefill = next(info for info in prefills if info.worker == name)
        decodes = [info for info in decodes if info.cache_root == prefill.cache_root]
        name = choose_decode(
            [self._decode_load(info) for info in decodes], needed_tokens=len(tokens) + expected_tokens
        )
        decode = next(info for info in decodes if info.worker == name)
        return Route(prefill, decode, reach)

    async def _hit_tokens(
        self, prefills: Sequence[WorkerInfo], tokens: TokenIds, tenant_key: bytes
    ) -> dict[tuple[bytes, int], dict[str, int]]:
        """By (root, block length) of the pool, leading tokens of the prompt that each worker and store holds."""
        hits: dict[tuple[bytes, int], dict[str, int]] = {}
        for root, block_tokens in sorted({_layout(info) for info in prefills}):
            hashes = await self._chain(tokens, root, block_tokens, tenant_key)
            found = self._cluster.hits(hashes) if hashes else {}
            hits[root, block_tokens] = {worker: blocks * block_tokens for worker, blocks in found.items()}
        return hits

    def _prefill_load(
        self, info: WorkerInfo, hits: Mapping[str, int], stores: Mapping[str, str], prompt_tokens: int
    ) -> PrefillLoad:
        stored = hits.get(stores.get(info.machine, ""), 0)
        return PrefillLoad(
            info.worker,
            self._queued(info),
            min(hits.get(info.worker, 0), prompt_tokens),
            min(stored, prompt_tokens),
        )

    async def _chain(
        self, tokens: TokenIds, root: bytes, block_tokens: int, tenant_key: bytes
    ) -> Sequence[bytes]:
        def compute() -> Sequence[bytes]:
            return prefix_hash_chain(tokens, block_tokens=block_tokens, root=root, tenant_key=tenant_key)

        if len(tokens) > _IN_THREAD_ABOVE_TOKENS:
            return await asyncio.to_thread(compute)
        return compute()

    def _queued(self, info: WorkerInfo) -> int:
        return max(info.queued_tokens, self._ledger.tokens(info.worker))

    def _decode_load(self, info: WorkerInfo) -> DecodeLoad:
        total_tokens = max(1, info.total_pages * info.block_tokens)
        reported = (info.total_pages - info.free_pages) * info.block_tokens
        return DecodeLoad(
            info.worker,
            max(0, reported, self._ledger.tokens(info.worker)),
            total_tokens,
            max(info.running, self._ledger.requests(info.worker)),
        )


def _layout(info: WorkerInfo) -> tuple[bytes, int]:
    """What workers must agree on to share blocks."""
    return info.cache_root, info.block_tokens
