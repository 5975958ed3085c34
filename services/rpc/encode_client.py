"""Typed client of whatever embeds images. Every call takes a deadline and raises ``ServiceError``."""

from __future__ import annotations

from epdserve.services.image_types import EmbeddingWish, EncodeJob, EncodeResult, LentEmbeddings
from epdserve.services.rpc import convert_encode as convert
from epdserve.services.rpc.client import WorkerClient, called
from epdserve.services.rpc.convert_worker import description_from_pb
from epdserve.services.rpc.pb import common_pb2, encode_pb2, encode_pb2_grpc
from epdserve.services.types import WorkerDescription


class EncodeClient(WorkerClient):
    """Calls of an encode worker, or of a prefill worker that has a vision encoder.

    Beyond what the worker itself refuses, every method raises ``WorkerLost`` if it cannot be reached and
    ``DeadlineExceeded``.
    """

    def __init__(self, address: str, *, token: str, worker: str | None = None) -> None:
        super().__init__(address, token=token, worker=worker)
        self._stub = encode_pb2_grpc.EncodeStub(self._channel)

    async def run(self, job: EncodeJob, *, deadline_s: float) -> EncodeResult:
        """Have all images of a job ready."""
        call = self._stub.Run(convert.job_to_pb(job), timeout=deadline_s, metadata=self._metadata)
        return convert.result_from_pb(await called(call, worker=self.worker))

    async def lend(self, wish: EmbeddingWish, *, deadline_s: float) -> LentEmbeddings:
        """Have an image's embeddings lent, once they are there."""
        call = self._stub.Lend(convert.wish_to_pb(wish), timeout=deadline_s, metadata=self._metadata)
        return convert.lent_from_pb(await called(call, worker=self.worker))

    async def end_loan(self, lease: str, *, incarnation: str, deadline_s: float) -> bool:
        """End a lease; whether it still held, that is whether what was read under it can be trusted."""
        request = encode_pb2.EndLoanRequest(lease=lease, incarnation=incarnation)
        call = self._stub.EndLoan(request, timeout=deadline_s, metadata=self._metadata)
        return (await called(call, worker=self.worker)).held

    async def describe(self, *, deadline_s: float) -> WorkerDescription:
        """Facts of the worker and the door to its memory."""
        call = self._stub.Describe(common_pb2.DescribeRequest(), timeout=deadline_s, metadata=self._metadata)
        return description_from_pb(await called(call, worker=self.worker))
