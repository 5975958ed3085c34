"""Which router wants which request's output: the bookkeeping behind the decode streams.

Synchronous and without I/O. Each router has one outbox that outlives its stream. A router that comes back
within ``orphan_grace_s`` finds its requests running; one that does not has them cancelled. A new life of a
router (another session under the same id) ends at once what the former left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from epdserve.services.errors import Cancelled, Internal, InvalidRequest, Overloaded, ServiceError
from epdserve.services.rpc.convert import decode_job_from_pb
from epdserve.services.rpc.outbox import Outbox
from epdserve.services.rpc.pb import decode_pb2
from epdserve.services.types import DecodeJob, ErrorInfo, TokenChunk

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of what a worker keeps for its routers.

    Attributes:
        orphan_grace_s: How long requests run on after their router's stream broke.
        keep_ended_s: How long the end of a request waits for its acknowledgement.
        unacknowledged_tokens: Of one request; beyond it the request is cancelled, nobody takes its output.
        requests: Of one router, ended but unacknowledged ones included.
        sign_of_life_s: An idle stream carries an empty step this often.
        hello_timeout_s: A stream that does not introduce itself is closed.
        frame_gap_s: Frames of output keep this distance at most; see ``gap_a_request_s``.
        gap_a_request_s: Of the distance, for each request that a router has here: the fuller frames are, the fewer
            may be sent. What comes meanwhile shares the next one.
    """

    orphan_grace_s: float = 10.0
    keep_ended_s: float = 30.0
    unacknowledged_tokens: int = 16_384
    requests: int = 4_096
    sign_of_life_s: float = 2.0
    hello_timeout_s: float = 5.0
    frame_gap_s: float = 0.004
    gap_a_request_s: float = 0.000_25

    def gap_s(self, requests: int) -> float:
        """Pause after a frame to a router that has ``requests`` here."""
        return min(self.frame_gap_s, requests * self.gap_a_request_s)


@dataclass(slots=True)
class SessionCounts:
    """What happened so far; read by metrics."""

    streams_opened: int = 0
    orphans_cancelled: int = 0
    unread_cancelled: int = 0
    replays: int = 0
    chunks_ignored: int = 0
    frames_sent: int = 0
    tokens_sent: int = 0


@dataclass(slots=True)
class RouterState:
    """One router.

    Attributes:
        generation: Number of its streams so far; only the latest one counts.
        unknown: Requests it asked for that are not here; an ordered set.
        wake: Set whenever its stream has something to look at.
    """

    name: str
    session: str
    generation: int = 0
    attached: bool = False
    left_at: float = 0.0
    outbox: Outbox = field(default_factory=Outbox)
    unknown: dict[str, None] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class DecodeDesk:
    """All routers of one worker. Owned by the event loop; not thread-safe."""

    def __init__(
        self,
        *,
        worker: str,
        submit: Callable[[DecodeJob], None],
        cancel: Callable[[str], None],
        limits: SessionLimits,
        clock: Callable[[], float],
    ) -> None:
        self.limits = limits
        self.counts = SessionCounts()
        self.routers: dict[str, RouterState] = {}
        self._worker, self._submit, self._cancel, self._clock = worker, submit, cancel, clock
        self._owner: dict[str, str] = {}  # request -> router

    def enter(self, name: str, session: str) -> RouterState:
        """A router opens a stream; the one it had before is void."""
        router = self.routers.get(name)
        if router is None:
            router = self.routers[name] = RouterState(name, session)
        elif router.session != session:
            log.info("router came back as another", extra={"router": name, "requests": len(router.outbox)})
            self.drop_requests(router)
            router.session = session
        router.generation += 1
        router.attached = True
        router.unknown.clear()
        router.wake.set()  # the stream this one replaces looks up and leaves
        self.counts.streams_opened += 1
        log.info("router attached", extra={"router": name, "requests": len(router.outbox)})
        return router

    def leave(self, router: RouterState, generation: int) -> None:
        """A stream ended; if no other took its place, the router's time runs."""
        if router.generation == generation:
            router.attached, router.left_at = False, self._clock()

    def handle(self, router: RouterState, frame: decode_pb2.RouterFrame) -> None:
        """Do what a frame says.

        Raises:
            InvalidRequest: A frame that means nothing here.
            Overloaded: More requests than one router may have.
        """
        match frame.WhichOneof("frame"):
            case "submit":
                self._take_job(router, frame.submit)
            case "resume":
                if router.outbox.rewind(frame.resume.request_id, frame.resume.offset):
                    self.counts.replays += 1
                else:
                    router.unknown[frame.resume.request_id] = None
            case "acks":
                for ack in frame.acks.acks:
                    if router.outbox.acknowledge(ack.request_id, ack.offset, final=ack.final):
                        self._disown(router, ack.request_id)
            case "cancel":
                self._drop_request(router, frame.cancel.request_id)
            case "many":
                for one in frame.many.frames:
                    if one.WhichOneof("frame") == "many":
                        raise InvalidRequest("frames that hold frames hold no others")
                    self.handle(router, one)
            case other:
                raise InvalidRequest(f"a decode stream cannot hold {other} here")
        router.wake.set()

    def publish(self, chunks: Sequence[TokenChunk]) -> None:
        """Put new output where its router finds it."""
        for chunk in chunks:
            router = self.routers.get(self._owner.get(chunk.request_id, ""))
            if router is None or chunk.request_id not in router.outbox:
                self.counts.chunks_ignored += 1
                continue
            if not router.outbox.append(chunk, now=self._clock()):
                self._refuse_chunk(router, chunk)
            elif router.outbox.unacknowledged(chunk.request_id) > self.limits.unacknowledged_tokens:
                self.counts.unread_cancelled += 1
                self.fail(router, chunk.request_id, Cancelled("the router does not take the output"))
            router.wake.set()

    def fail(self, router: RouterState, request_id: str, error: ServiceError) -> None:
        """End a running request from our side, and its work."""
        if router.outbox.is_live(request_id):
            self._end(router, request_id, error)
        self._cancel(request_id)

    def drop_requests(self, router: RouterState) -> None:
        """Forget all of a router's requests and end their work."""
        for request_id in list(router.outbox):
            self._drop_request(router, request_id)

    def sweep(self) -> None:
        """Cancel what routers left behind, forget ends nobody acknowledges."""
        now = self._clock()
        for name, router in list(self.routers.items()):
            if not router.attached and now - router.left_at >= self.limits.orphan_grace_s:
                orphans = len(router.outbox.live())
                self.counts.orphans_cancelled += orphans
                log.info("router stayed away", extra={"router": name, "requests": orphans})
                self.drop_requests(router)
                del self.routers[name]
                continue
            for request_id in router.outbox.ended_before(now - self.limits.keep_ended_s):
                self._drop_request(router, request_id)

    def _take_job(self, router: RouterState, message: decode_pb2.DecodeJob) -> None:
        request_id, offset = message.request_id, len(message.emitted) // 4
        if request_id in router.outbox:
            # sent again because the first may have been lost: the answer is its output
            router.outbox.rewind(request_id, offset)
            return
        if len(router.outbox) >= self.limits.requests:
            raise Overloaded(f"router {router.name} has {len(router.outbox)} requests", worker=self._worker)
        router.outbox.open(request_id, offset=offset)
        try:
            job = decode_job_from_pb(message)
            if self._owner.get(request_id, router.name) != router.name:
                raise InvalidRequest(f"request id {request_id} is in use", param="request_id")
            self._owner[request_id] = router.name
            self._submit(job)
        except ServiceError as error:
            self._end(router, request_id, error)

    def _refuse_chunk(self, router: RouterState, chunk: TokenChunk) -> None:
        self.counts.chunks_ignored += 1
        if router.outbox.is_live(chunk.request_id):
            where = router.outbox.end(chunk.request_id)
            message = f"output of {chunk.request_id} goes on at {chunk.offset} instead of {where}"
            log.error("decode output has a gap", extra={"offset": chunk.offset, "expected": where})
            self.fail(router, chunk.request_id, Internal(message))

    def _end(self, router: RouterState, request_id: str, error: ServiceError) -> None:
        error.worker = error.worker or self._worker
        end = router.outbox.end(request_id)
        router.outbox.append(TokenChunk(request_id, end, (), error=ErrorInfo.of(error)), now=self._clock())
        router.wake.set()

    def _drop_request(self, router: RouterState, request_id: str) -> None:
        """Forget a request at once and end its work, if it is this router's."""
        mine = self._owner.get(request_id) == router.name
        running = router.outbox.is_live(request_id)
        router.outbox.forget(request_id)
        self._disown(router, request_id)
        if mine and running:
            self._cancel(request_id)

    def _disown(self, router: RouterState, request_id: str) -> None:
        if self._owner.get(request_id) == router.name:
            del self._owner[request_id]
