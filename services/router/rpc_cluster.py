"""The cluster over gRPC: connections follow the registry's view, block indexes follow the workers' events.

A connection belongs to one life of one worker. When the view lists another life, or none, the old connection is
retired: what still ran on it is lost, and says so with ``WorkerLost`` so that the pipeline goes on elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Final, NewType, Self, cast

from epdserve.kvstore.block_index import BlockIndex, BlockIndexCounts
from epdserve.kvstore.types import BlockEvents, BlockHash
from epdserve.services.errors import Cancelled, ServiceError, WorkerLost
from epdserve.services.image_types import EncodeJob, EncodeResult
from epdserve.services.pool.view import ClusterView
from epdserve.services.router.cluster import TokenStream
from epdserve.services.rpc.client import PrefillClient
from epdserve.services.rpc.decode_session import DecodeSession
from epdserve.services.rpc.encode_client import EncodeClient
from epdserve.services.rpc.watch import watch_blocks
from epdserve.services.types import (
    BlockUpdate,
    DecodeJob,
    KVHandle,
    PrefillJob,
    PrefillResult,
    TokenChunk,
    WorkerInfo,
    WorkerRole,
)

_log = logging.getLogger(__name__)

_RECONCILE_S: Final = 0.25
_FIRST_VIEW_S: Final = 3.0
_FIRST_SNAPSHOTS_S: Final = 1.0
_CLOSE_S: Final = 5.0
_ABANDON_S: Final = 2.0
_CANCEL_TRIES: Final = 20
_DRIFT_PAUSE_S: Final = 0.5

Life = NewType("Life", tuple[str, str, str])


class RpcCluster:
    """Implements ``Cluster``. Owned by one event loop.

    Attributes:
        drifts: How often what was known of a worker's blocks was not what it holds.
        lookups: Of prompts in the index; ``blind_lookups`` while some worker's blocks were not known yet.

    Args:
        view: Started and closed by this object; its registry is the caller's.
        token: The cluster token.
        router_id: Names this router to decode workers; unique among the routers of a cluster.
    """

    def __init__(self, view: ClusterView, *, token: str, router_id: str) -> None:
        self._view = view
        self._token = token
        self._router_id = router_id
        self._session = uuid.uuid4().hex
        self._prefills: dict[Life, PrefillClient] = {}
        self._decodes: dict[Life, DecodeSession] = {}
        self._encoders: dict[Life, EncodeClient] = {}
        self._watches: dict[Life, asyncio.Task[None]] = {}
        self._index = BlockIndex()
        self._indexed: set[Life] = set()  # whose blocks are known
        self._snapshot_came = asyncio.Event()
        self._past_reconnects = 0
        self.drifts = self.lookups = self.blind_lookups = 0
        self._closing: set[asyncio.Task[None]] = set()
        self._reconciler: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the registry and connect; a registry that is away is no reason not to start.

        Waits a moment for the first snapshots of blocks: a router that begins without them sends prompts anywhere.
        """
        await self._view.start(wait_s=_FIRST_VIEW_S)
        self._reconcile()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_SNAPSHOTS_S):
                while self._watches.keys() - self._indexed:
                    self._snapshot_came.clear()
                    await self._snapshot_came.wait()
        self._reconciler = asyncio.create_task(self._reconcile_regularly(), name="reconcile-workers")

    async def close(self) -> None:
        """Cancel what runs on all workers and disconnect."""
        if self._reconciler is not None:
            self._reconciler.cancel()
            await asyncio.wait([self._reconciler])
        for life in [*self._prefills, *self._decodes, *self._encoders, *self._watches]:
            self._retire(life)
        if self._closing:
            await asyncio.wait(self._closing, timeout=_CLOSE_S)
        await self._view.close()

    def workers(self) -> Sequence[WorkerInfo]:
        """As the view has them."""
        return self._view.workers()

    async def drain(self, worker: str, wanted: bool) -> None:
        """Through the registry: the worker's next heartbeat hears it."""
        await self._view.drain(worker, wanted)

    def hits(self, hashes: Sequence[bytes]) -> Mapping[str, int]:
        """As the events of prefill workers and stores tell."""
        self.lookups += 1
        self.blind_lookups += len(self._indexed) < len(self._watches)
        return self._index.longest_prefix(cast("Sequence[BlockHash]", hashes))

    async def prefill(self, worker: str, job: PrefillJob, *, timeout_s: float) -> PrefillResult:
        """One unary call; cancelling it cancels the job."""
        client = self._prefill_client(self._live(worker))
        try:
            return await client.run(job, deadline_s=timeout_s)
        except BaseException:
            # The answer may be under way, with a lease that nobody else knows of.
            self._later(_abandon(client, job.request_id))
            raise

    async def encode(self, worker: str, job: EncodeJob, *, timeout_s: float) -> EncodeResult:
        """One unary call; cancelling it leaves the worker its work."""
        info = self._live(worker)
        life = _life(info)
        if life not in self._encoders:
            self._encoders[life] = EncodeClient(info.address, token=self._token, worker=info.worker)
        return await self._encoders[life].run(job, deadline_s=timeout_s)

    def decode(self, worker: str, job: DecodeJob, *, timeout_s: float) -> TokenStream:
        """A share of the worker's stream."""
        return _SessionStream(self, worker, job, timeout_s)

    async def release(self, handle: KVHandle, *, timeout_s: float) -> bool:
        """End the lease, if the life that gave it is still there; with another life it is over anyway."""
        info = self._view.get(handle.worker)
        if info is None or info.incarnation != handle.incarnation:
            return False
        client = self._prefill_client(info)
        return await client.release_lease(handle.lease, incarnation=handle.incarnation, deadline_s=timeout_s)

    def index_counts(self) -> BlockIndexCounts:
        """Size and news of the block index."""
        return self._index.counts()

    def reconnects(self) -> int:
        """How often streams to decode workers broke and were opened again."""
        return self._past_reconnects + sum(session.reconnects for session in self._decodes.values())

    def view_age_s(self) -> float:
        """Since the registry last answered."""
        return self._view.age_s

    def session_of(self, worker: str) -> DecodeSession:
        """The session with the present life of a decode worker.

        Raises:
            WorkerLost: It has none.
        """
        info = self._live(worker)
        life = _life(info)
        session = self._decodes.get(life)
        if session is None:
            session = DecodeSession(
                info.address,
                token=self._token,
                router_id=self._router_id,
                session=self._session,
                worker=info.worker,
            )
            session.start()
            self._decodes[life] = session
        return session

    def is_retired(self, session: DecodeSession) -> bool:
        """Whether the life behind a session has gone."""
        return session not in self._decodes.values()

    def _live(self, worker: str) -> WorkerInfo:
        info = self._view.get(worker)
        if info is None:
            raise WorkerLost("the worker has left", worker=worker)
        return info

    def _prefill_client(self, info: WorkerInfo) -> PrefillClient:
        life = _life(info)
        if life not in self._prefills:
            self._prefills[life] = PrefillClient(info.address, token=self._token, worker=info.worker)
        return self._prefills[life]

    async def _reconcile_regularly(self) -> None:
        while True:
            await asyncio.sleep(_RECONCILE_S)
            self._reconcile()

    def _reconcile(self) -> None:
        """Connect to new lives, retire the connections of old ones."""
        infos = {_life(info): info for info in self._view.workers()}
        for life in {*self._prefills, *self._decodes, *self._encoders, *self._watches} - infos.keys():
            self._retire(life)
        for life, info in infos.items():
            if info.role is WorkerRole.DECODE:
                self.session_of(info.worker)
            elif info.role in (WorkerRole.PREFILL, WorkerRole.STORE) and life not in self._watches:
                task = asyncio.create_task(self._watch(info), name=f"watch-blocks {info.worker}")
                self._watches[life] = task

    def _retire(self, life: Life) -> None:
        """Forget a life and close what belongs to it in the background."""
        if (watch := self._watches.pop(life, None)) is not None:
            self._index.forget(life[0])
            self._indexed.discard(life)
            self._later(_ended(watch))
        if (client := self._prefills.pop(life, None)) is not None:
            self._later(client.close())
        if (encoder := self._encoders.pop(life, None)) is not None:
            self._later(encoder.close())
        if (session := self._decodes.pop(life, None)) is not None:
            _log.info("decode worker left", extra={"worker": life[0], "requests": session.live})
            self._past_reconnects += session.reconnects
            self._later(session.close())

    def _later(self, work: Coroutine[None, None, None]) -> None:
        """Let work run on beside its caller; ``close`` waits for it."""
        task = asyncio.create_task(work, name="afterwards")
        self._closing.add(task)
        task.add_done_callback(self._closed)

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("closing or abandoning failed", exc_info=error)

    async def _watch(self, info: WorkerInfo) -> None:
        while True:
            await self._watch_until_drift(info)
            await asyncio.sleep(_DRIFT_PAUSE_S)

    async def _watch_until_drift(self, info: WorkerInfo) -> None:
        """Follow a worker's blocks until its digest says that what is known of it is wrong: a snapshot heals that."""
        async with aclosing(watch_blocks(info.address, role=info.role, token=self._token)) as updates:
            async for update in updates:
                if update.digest and update.digest != self._index.digest(info.worker):
                    self.drifts += 1
                    _log.warning("block index drifted", extra={"worker": info.worker})
                    return
                self._apply(info.worker, update)
                if update.snapshot and _life(info) in self._watches:
                    self._indexed.add(_life(info))
                    self._snapshot_came.set()

    def _apply(self, worker: str, update: BlockUpdate) -> None:
        added = cast("tuple[BlockHash, ...]", update.added)
        if update.snapshot:
            self._index.load_snapshot(worker, update.next_seq, added)
            return
        removed = cast("tuple[BlockHash, ...]", update.removed)
        # Gaps cannot come here: the watch begins anew with a snapshot instead
        self._index.apply(worker, BlockEvents(update.first_seq, added, removed))


class _SessionStream:
    """A request's output; what is lost with a retired session is a lost worker's."""

    def __init__(self, cluster: RpcCluster, worker: str, job: DecodeJob, timeout_s: float) -> None:
        self._cluster = cluster
        self._worker = worker
        self._session = cluster.session_of(worker)
        self._stream = self._session.submit(job, deadline_s=timeout_s)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenChunk:
        try:
            return await anext(self._stream)
        except Cancelled as error:
            if self._cluster.is_retired(self._session):
                raise WorkerLost("the worker has left", worker=self._worker) from error
            raise

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _abandon(client: PrefillClient, request_id: str) -> None:
    with contextlib.suppress(ServiceError):  # a worker that is lost holds nothing
        await client.abandon(request_id, deadline_s=_ABANDON_S)


def _life(info: WorkerInfo) -> Life:
    return Life((info.worker, info.incarnation, info.address))


async def _ended(task: asyncio.Task[None]) -> None:
    """Cancel a task until it ends: a call that fails as it is cancelled tells its failure and not the cancelling."""
    for _ in range(_CANCEL_TRIES):
        task.cancel()
        await asyncio.wait([task], timeout=_CLOSE_S / _CANCEL_TRIES)
        if task.done():
            return
    _log.error("a task does not end", extra={"task": task.get_name()})
