"""Typed clients of the workers. Every call takes a deadline and raises ``ServiceError``.

``PrefillClient`` and ``DecodeClient`` hold one channel each; the decode stream has a file of its own
(``decode_session``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Self, TypeVar

import grpc
from epdserve.services.rpc.auth import token_metadata
from epdserve.services.rpc.channel import open_channel
from epdserve.services.rpc.convert import prefill_job_to_pb, prefill_result_from_pb
from epdserve.services.rpc.convert_worker import description_from_pb
from epdserve.services.rpc.pb import common_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from epdserve.services.rpc.prefill_stream import NotServedError, PrefillStream
from epdserve.services.rpc.status import error_of
from epdserve.services.types import PrefillJob, PrefillResult, WorkerDescription

T = TypeVar("T")

_CLOSE_S = 2.0


async def called(call: Awaitable[T], *, worker: str | None) -> T:
    """Await a call; a failure becomes the error that it stands for."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise error_of(error, worker=worker) from None


class WorkerClient:
    """A channel to one worker.

    Args:
        address: ``host:port``, from the registry.
        token: The cluster token.
        worker: Named in errors.
    """

    def __init__(self, address: str, *, token: str, worker: str | None = None) -> None:
        self.address = address
        self.worker = worker
        self._metadata = token_metadata(token)
        self._channel = open_channel(address)

    @property
    def channel(self) -> grpc.aio.Channel:
        """For calls of a service that has no client of its own."""
        return self._channel

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries."""
        return self._metadata

    async def close(self) -> None:
        """End running calls and the connection."""
        async with asyncio.timeout(_CLOSE_S):
            await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class PrefillClient(WorkerClient):
    """Calls of a prefill worker."""

    def __init__(self, address: str, *, token: str, worker: str | None = None) -> None:
        super().__init__(address, token=token, worker=worker)
        self._stub = prefill_pb2_grpc.PrefillStub(self._channel)
        self._stream: PrefillStream | None = PrefillStream(self._stub, self._metadata, worker=worker)

    async def close(self) -> None:
        """End running calls and the connection."""
        if self._stream is not None:
            await self._stream.close()
        await super().close()

    async def run(self, job: PrefillJob, *, deadline_s: float) -> PrefillResult:
        """Fill KV for a prompt. Cancelling this coroutine cancels the job on the worker.

        Raises:
            ServiceError: What the worker raised; ``WorkerLost`` if it cannot be reached; ``DeadlineExceeded``.
        """
        if self._stream is not None:
            try:
                return await self._stream.run(job, deadline_s=deadline_s)
            except NotServedError:
                self._stream = None
        call = self._stub.Run(prefill_job_to_pb(job), timeout=deadline_s, metadata=self._metadata)
        return prefill_result_from_pb(await called(call, worker=self.worker))

    async def release_lease(self, lease: str, *, incarnation: str, deadline_s: float) -> bool:
        """End a lease; whether it still held, that is whether what was read under it can be trusted."""
        request = prefill_pb2.ReleaseLeaseRequest(lease=lease, incarnation=incarnation)
        call = self._stub.ReleaseLease(request, timeout=deadline_s, metadata=self._metadata)
        return (await called(call, worker=self.worker)).held

    async def abandon(self, request_id: str, *, deadline_s: float) -> None:
        """Undo a job whose ``run`` was given up: its answer, and the lease in it, may have been under way."""
        request = prefill_pb2.AbandonRequest(request_id=request_id)
        call = self._stub.Abandon(request, timeout=deadline_s, metadata=self._metadata)
        await called(call, worker=self.worker)

    async def describe(self, *, deadline_s: float) -> WorkerDescription:
        """Facts of the worker and the door to its memory."""
        request = common_pb2.DescribeRequest()
        call = self._stub.Describe(request, timeout=deadline_s, metadata=self._metadata)
        return description_from_pb(await called(call, worker=self.worker))


class DecodeClient(WorkerClient):
    """Calls of a decode worker other than its stream."""

    def __init__(self, address: str, *, token: str, worker: str | None = None) -> None:
        super().__init__(address, token=token, worker=worker)
        self._stub = decode_pb2_grpc.DecodeStub(self._channel)

    async def describe(self, *, deadline_s: float) -> WorkerDescription:
        """Facts of the worker and the door to its memory."""
        request = common_pb2.DescribeRequest()
        call = self._stub.Describe(request, timeout=deadline_s, metadata=self._metadata)
        return description_from_pb(await called(call, worker=self.worker))
