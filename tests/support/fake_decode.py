"""A decode worker without a model: tokens are a function of request and offset. Streams can be broken at any frame."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from epdserve.services.errors import Unavailable
from epdserve.services.rpc.decode_desk import SessionLimits
from epdserve.services.rpc.decode_server import DecodeSessions
from epdserve.services.rpc.pb import decode_pb2
from epdserve.services.rpc.server import RpcServer, serve_servicer
from epdserve.services.rpc.servicers import DecodeServicer
from epdserve.services.types import (
    BlockUpdate,
    DecodeJob,
    DecodeReceipt,
    FinishReason,
    SamplingParams,
    TokenChunk,
    TransferEndpoint,
    WorkerDescription,
    WorkerInfo,
    WorkerRole,
    WorkerState,
    token_ids,
)

TOKEN = "a-cluster-token-of-tests"


def worker_info(
    worker: str = "decode-0", *, role: WorkerRole = WorkerRole.DECODE, **changes: Any
) -> WorkerInfo:
    """A plausible worker; any field can be given."""
    fields: dict[str, Any] = {
        "worker": worker,
        "role": role,
        "incarnation": "0000000000000001-00000000",
        "address": "127.0.0.1:1",
        "metrics_address": "127.0.0.1:2",
        "state": WorkerState.READY,
        "cache_root": b"root",
        "block_tokens": 128,
        "max_context_tokens": 4096,
        "queued_tokens": 0,
        "running": 0,
        "free_pages": 10,
        "total_pages": 20,
        "step_age_s": 0.0,
        "wire_version": 1,
        "model_name": "demo",
    }
    return WorkerInfo(**(fields | changes))


def decode_job(request_id: str, *, max_tokens: int, emitted: tuple[int, ...] = ()) -> DecodeJob:
    """A job for ``FakeDecode``."""
    sampling = SamplingParams(seed=0, max_tokens=max_tokens)
    return DecodeJob(request_id, token_ids([1, 2]), b"", False, sampling, None, token_ids(emitted))


def expected_token(request_id: str, offset: int) -> int:
    """Token number ``offset`` of a request's output."""
    return (sum(request_id.encode()) * 31 + offset * 7) % 50_000


def expected_tokens(request_id: str, count: int) -> list[int]:
    """The first tokens of a request's output."""
    return [expected_token(request_id, offset) for offset in range(count)]


class FakeDecode:
    """The engine: one token a step for every running request, until ``max_tokens``."""

    def __init__(self, *, incarnation: str = "1", limits: SessionLimits | None = None) -> None:
        self.running: dict[str, tuple[DecodeJob, int]] = {}
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        self.sessions = DecodeSessions(
            worker="decode-0",
            incarnation=incarnation,
            submit=self._submit,
            cancel=self._cancel,
            limits=limits,
        )

    def _submit(self, job: DecodeJob) -> None:
        self.submitted.append(job.request_id)
        self.running[job.request_id] = (job, len(job.emitted))

    def _cancel(self, request_id: str) -> None:
        if self.running.pop(request_id, None) is not None:
            self.cancelled.append(request_id)

    def step(self) -> None:
        """One token for every running request."""
        chunks = []
        for request_id, (job, offset) in list(self.running.items()):
            last = offset + 1 >= job.sampling.max_tokens
            tokens = (expected_token(request_id, offset),)
            if last:
                receipt = DecodeReceipt(worker="decode-0", steps=offset + 1)
                chunks.append(TokenChunk(request_id, offset, tokens, FinishReason.LENGTH, receipt=receipt))
                del self.running[request_id]
            else:
                chunks.append(TokenChunk(request_id, offset, tokens))
                self.running[request_id] = (job, offset + 1)
        if chunks:
            self.sessions.publish(chunks)

    async def run(self, *, step_s: float = 0.001) -> None:
        """Step until cancelled."""
        while True:
            self.step()
            await asyncio.sleep(step_s)

    async def describe(self) -> WorkerDescription:
        """Facts nobody looks at."""
        return WorkerDescription(worker_info(), TransferEndpoint("agent", b"", ()))

    async def watch_blocks(self) -> AsyncIterator[BlockUpdate]:
        """No blocks at all."""
        yield BlockUpdate("1", True, 0, 0, (), ())
        await asyncio.Event().wait()


class FlakyServicer(DecodeServicer):
    """Asks before every frame, either way, whether the stream is to break there.

    Attributes:
        breaks: Given the direction ("in", "out", or "sent" after a frame left) and the number of the frame since
            the start; True breaks the stream.
    """

    def __init__(self, engine: FakeDecode, breaks: Callable[[str, int], bool]) -> None:
        super().__init__(engine, engine.sessions)
        self.breaks = breaks
        self.frames = {"in": 0, "out": 0, "sent": 0}
        self.broken = 0

    def _maybe_break(self, direction: str) -> None:
        number = self.frames[direction]
        self.frames[direction] += 1
        if self.breaks(direction, number):
            self.broken += 1
            raise Unavailable(f"broken at {direction} {number}")

    async def Session(  # type: ignore[override]  # noqa: N802
        self,
        request_iterator: AsyncIterator[decode_pb2.RouterFrame],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """The session behind a gate at each frame."""

        async def frames() -> AsyncIterator[decode_pb2.RouterFrame]:
            async for frame in request_iterator:
                self._maybe_break("in")
                yield frame

        class Gate:
            async def write(gate, frame: decode_pb2.DecodeFrame) -> None:  # noqa: N805
                self._maybe_break("out")
                await context.write(frame)
                self._maybe_break("sent")

            def __getattr__(gate, name: str) -> Any:  # noqa: N805
                return getattr(context, name)

        await super().Session(frames(), Gate())  # type: ignore[arg-type]


async def serve_flaky(
    engine: FakeDecode, breaks: Callable[[str, int], bool], *, address: str = "127.0.0.1:0"
) -> tuple[RpcServer, FlakyServicer]:
    """Serve a fake worker whose streams break where told."""
    servicer = FlakyServicer(engine, breaks)
    server = await serve_servicer(servicer, engine.sessions, token=TOKEN, address=address)
    return server, servicer
