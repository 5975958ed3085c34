"""The live streams of one decode session, and what must be told to the worker about them.

Synchronous and without I/O: frames that came in go into ``take``, frames to send come out of ``control_frames`` and
``ack_frame``. Each of the pending sets is bounded by the live requests: while the stream is broken nothing new is
submitted, so nothing new can be left either.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Final

from epdserve.services.errors import Internal, ServiceError, WorkerLost
from epdserve.services.rpc.convert import chunk_from_pb, decode_job_to_pb
from epdserve.services.rpc.decode_stream import DecodeStream
from epdserve.services.rpc.pb import decode_pb2

log = logging.getLogger(__name__)

# Of one message, about; the rest of a longer list of frames follows in another
_MESSAGE_BYTES: Final = 2**20


class StreamTable:
    """Streams by request id. Owned by the session's event loop.

    Attributes:
        wake: Set whenever there may be something to write.
    """

    def __init__(self, *, worker: str | None) -> None:
        self.wake = asyncio.Event()
        self._worker = worker
        self._streams: dict[str, DecodeStream] = {}
        self._unsent: dict[str, DecodeStream] = {}  # of these, not submitted
        self._resumes: dict[str, None] = {}  # ordered sets
        self._cancels: dict[str, None] = {}
        self._acks: dict[str, tuple[int, bool]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[DecodeStream]:
        return iter(list(self._streams.values()))

    def get(self, request_id: str) -> DecodeStream | None:
        """The live stream of a request."""
        return self._streams.get(request_id)

    def add(self, stream: DecodeStream) -> None:
        """A stream to submit."""
        self._streams[stream.request_id] = self._unsent[stream.request_id] = stream
        self.wake.set()

    def leave(self, stream: DecodeStream) -> None:
        """The consumer has gone, or must go: its work is to be cancelled unless it has ended."""
        if self._streams.get(stream.request_id) is stream:
            self._drop(stream)
            self._acks.pop(stream.request_id, None)
            if stream.submitted:
                self._cancels[stream.request_id] = None
            self.wake.set()

    def end(self, stream: DecodeStream, error: ServiceError) -> None:
        """The worker's side of this stream is gone."""
        self._drop(stream)
        stream.fail(error)

    def connected(self) -> None:
        """A new stream to the same life of the worker: ask for all that it may have."""
        self._resumes = {name: None for name, stream in self._streams.items() if stream.submitted}
        self.wake.set()

    def restarted(self) -> None:
        """The worker is another: what it had is gone, what it never had can still be submitted."""
        for stream in self:
            if stream.submitted:
                self.end(stream, WorkerLost("decode worker was restarted", worker=self._worker))
        self._acks.clear()
        self._cancels.clear()

    def take(self, frame: decode_pb2.DecodeFrame) -> None:
        """Put what a frame holds where it belongs.

        Raises:
            Internal: A frame that means nothing here.
        """
        match frame.WhichOneof("frame"):
            case "step":
                for chunk in frame.step.chunks:
                    self._take_chunk(chunk)
            case "unknown":
                self._take_unknown(frame.unknown.request_id)
            case other:
                raise Internal(f"decode worker sent {other}", worker=self._worker)

    def control_frames(self) -> list[decode_pb2.RouterFrame]:
        """Cancels, resumes and jobs to write now; they count as written."""
        frames = []
        for request_id in self._cancels:
            frames.append(decode_pb2.RouterFrame(cancel=decode_pb2.Cancel(request_id=request_id)))
        for request_id in self._resumes:
            resume = decode_pb2.Resume(request_id=request_id, offset=self._streams[request_id].received)
            frames.append(decode_pb2.RouterFrame(resume=resume))
        for stream in self._unsent.values():
            stream.submitted = True
            frames.append(decode_pb2.RouterFrame(submit=decode_job_to_pb(stream.job)))
        self._unsent.clear()
        self._cancels.clear()
        self._resumes.clear()
        return frames

    @property
    def acks_waiting(self) -> bool:
        """Whether ``ack_frame`` would hold anything."""
        return bool(self._acks)

    def ack_frame(self) -> decode_pb2.RouterFrame:
        """Acknowledgement of all that came since the last one."""
        acks = [
            decode_pb2.Ack(request_id=request_id, offset=offset, final=final)
            for request_id, (offset, final) in self._acks.items()
        ]
        self._acks.clear()
        return decode_pb2.RouterFrame(acks=decode_pb2.Acks(acks=acks))

    def _take_chunk(self, chunk: decode_pb2.TokenChunk) -> None:
        request_id = chunk.request_id
        stream = self._streams.get(request_id)
        if stream is None:
            # left, and the cancel was lost with a stream; or ended, and so was the acknowledgement
            self._cancels[request_id] = None
            self.wake.set()
            return
        taken = stream.take(chunk_from_pb(chunk))
        if taken.gap:
            self._resumes[request_id] = None
            self.wake.set()
        elif taken.overflow:
            log.info("consumer of decode output too slow", extra={"received_tokens": stream.received})
            self.leave(stream)
        else:
            if stream.ended:
                self._drop(stream)
            if not self._acks:
                self.wake.set()
            self._acks[request_id] = (stream.received, stream.ended)

    def _take_unknown(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        if stream.received == len(stream.job.emitted):
            stream.submitted = False  # the job may never have arrived; nothing of it has come
            self._unsent[request_id] = stream
            self.wake.set()
        else:
            lost = WorkerLost("decode worker no longer has the request", worker=self._worker)
            self.end(stream, lost)

    def _drop(self, stream: DecodeStream) -> None:
        self._streams.pop(stream.request_id, None)
        self._unsent.pop(stream.request_id, None)
        self._resumes.pop(stream.request_id, None)


def gathered(frames: list[decode_pb2.RouterFrame]) -> Iterator[decode_pb2.RouterFrame]:
    """The same in fewer messages: each costs both sides more than most of what they hold."""
    some: list[decode_pb2.RouterFrame] = []
    nbytes = 0
    for frame in frames:
        some.append(frame)
        nbytes += len(frame.submit.tokens)
        if nbytes >= _MESSAGE_BYTES:
            yield _one(some)
            some, nbytes = [], 0
    if some:
        yield _one(some)


def _one(frames: list[decode_pb2.RouterFrame]) -> decode_pb2.RouterFrame:
    if len(frames) == 1:
        return frames[0]
    return decode_pb2.RouterFrame(many=decode_pb2.RouterFrames(frames=frames))
