"""A cluster in one process that does what a script says, and counts what it was asked to do."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from epdserve.services.errors import ServiceError, WorkerLost
from epdserve.services.sampling import PromptLogprobs, TokenLogprob
from epdserve.services.types import (
    DecodeJob,
    DecodeReceipt,
    ErrorInfo,
    FinishReason,
    KVHandle,
    PrefillJob,
    PrefillResult,
    TailRef,
    TokenChunk,
    TokenIds,
    TokenSources,
    WorkerInfo,
    WorkerRole,
    WorkerState,
)

ROOT, DETERMINISTIC_ROOT = b"r" * 32, b"d" * 32


def worker_info(name: str, role: WorkerRole, **changes: object) -> WorkerInfo:
    """An idle, ready worker."""
    info = WorkerInfo(
        worker=name,
        role=role,
        incarnation="1",
        address="127.0.0.1:1",
        metrics_address="127.0.0.1:2",
        state=WorkerState.READY,
        cache_root=ROOT,
        block_tokens=16,
        max_context_tokens=4096,
        queued_tokens=0,
        running=0,
        free_pages=1000,
        total_pages=1000,
        step_age_s=0.0,
        wire_version=1,
        model_name="demo",
        deterministic_root=DETERMINISTIC_ROOT,
    )
    return replace(info, **changes)  # type: ignore[arg-type]


@dataclass
class Script:
    """What the model says: ids, in batches of ``batch``, ``gap_s`` apart, then a finish reason.

    Attributes:
        die_after: Number of outputs after which the decode worker is lost, on its first run only.
        stop_id: Appended to the ids when the request ends by itself.
        choices: What other choices say, by their number: ``ids`` is the first one's.
    """

    ids: Sequence[int] = ()
    stop_id: int | None = 1
    batch: int = 1
    gap_s: float = 0.0
    prefill_s: float = 0.0
    first_gap_s: float = 0.0
    cached_tokens: int = 0
    die_after: int | None = None
    prefill_errors: list[ServiceError] = field(default_factory=list)
    decode_errors: list[ServiceError] = field(default_factory=list)
    choices: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def said(self, job: DecodeJob) -> Sequence[int]:
        """Ids of the choice that a job is for; choices have their number in the id of the job."""
        match = re.search(r"-c(\d+)\.", job.request_id)
        return self.ids if match is None else self.choices.get(int(match[1]), self.ids)


class FakeCluster:
    """Implements the router's ``Cluster`` protocol."""

    def __init__(self, script: Script | None = None, infos: Sequence[WorkerInfo] | None = None) -> None:
        self.script = script or Script()
        self.infos = list(
            infos
            if infos is not None
            else [worker_info("p0", WorkerRole.PREFILL), worker_info("d0", WorkerRole.DECODE)]
        )
        self.held: dict[bytes, set[str]] = {}
        self.prefill_jobs: list[tuple[str, PrefillJob]] = []
        self.decode_jobs: list[tuple[str, DecodeJob]] = []
        self.open_leases: set[str] = set()
        self.drained: dict[str, bool] = {}
        self.released: list[str] = []
        self.running_prefills = 0
        self.running_decodes = 0
        self.cancelled_prefills = 0
        self.cancelled_decodes = 0
        self.started = self.closed = False
        self.on_lost: Callable[[str], None] = lambda worker: None
        self._lease_numbers = itertools.count()

    async def start(self) -> None:
        self.started = True

    async def close(self) -> None:
        self.closed = True

    def workers(self) -> Sequence[WorkerInfo]:
        return self.infos

    async def drain(self, worker: str, wanted: bool) -> None:
        self.drained[worker] = wanted

    def hits(self, hashes: Sequence[bytes]) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for info in self.infos:
            has = [info.worker in self.held.get(block_hash, ()) for block_hash in hashes]
            if has and has[0]:
                found[info.worker] = (*has, False).index(False)
        return found

    async def prefill(self, worker: str, job: PrefillJob, *, timeout_s: float) -> PrefillResult:
        self.prefill_jobs.append((worker, job))
        self.running_prefills += 1
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(self.script.prefill_s)
        except asyncio.CancelledError:
            self.cancelled_prefills += 1
            raise
        finally:
            self.running_prefills -= 1
        if self.script.prefill_errors:
            raise self.script.prefill_errors.pop(0)
        lease, *more = (f"lease{next(self._lease_numbers)}" for _ in range(job.readers))
        self.open_leases.update((lease, *more))
        handle = KVHandle(worker, "1", lease, (), TailRef(0, 1, 4096, 0, True), len(job.tokens))
        cached = self.script.cached_tokens
        told = None
        if job.prompt_logprobs is not None:
            told = _prompt_logprobs(job.tokens, job.prompt_logprobs)
        computed = max(0, len(job.tokens) - cached)
        sources = TokenSources(device=cached, computed=computed)
        return PrefillResult(handle, cached, 0, computed, 0.5, 1.5, tuple(more), told, sources)

    async def decode(
        self, worker: str, job: DecodeJob, *, timeout_s: float
    ) -> AsyncGenerator[TokenChunk, None]:
        self.decode_jobs.append((worker, job))
        self.running_decodes += 1
        ended = False
        try:
            if self.script.decode_errors:
                raise self.script.decode_errors.pop(0)
            await asyncio.sleep(self.script.first_gap_s)
            assert job.handle is not None
            self.open_leases.discard(job.handle.lease)
            for chunk in self._chunks(worker, job):
                ended = chunk.final
                yield chunk
                await asyncio.sleep(self.script.gap_s)
        except ServiceError:
            ended = True
            raise
        finally:
            self.running_decodes -= 1
            if not ended:
                self.cancelled_decodes += 1

    async def release(self, handle: KVHandle, *, timeout_s: float) -> bool:
        self.released.append(handle.lease)
        held = handle.lease in self.open_leases
        self.open_leases.discard(handle.lease)
        return held

    def _chunks(self, worker: str, job: DecodeJob) -> list[TokenChunk]:
        """All chunks from the job's offset on; raises through a poisoned last chunk if the worker dies."""
        stop = [] if self.script.stop_id is None or job.sampling.ignore_eos else [self.script.stop_id]
        said = self.script.said(job)
        ids = [*said, *stop][: job.sampling.max_tokens]
        reason = FinishReason.STOP if len(ids) == len(said) + len(stop) and stop else FinishReason.LENGTH
        chunks = []
        for start in range(len(job.emitted), len(ids), self.script.batch):
            end = min(start + self.script.batch, len(ids))
            if self.script.die_after is not None and start >= self.script.die_after:
                self.script.die_after = None
                self.on_lost(worker)
                error = WorkerLost("the worker died", worker=worker)
                chunks.append(TokenChunk(job.request_id, start, (), None, ErrorInfo.of(error)))
                return chunks
            last = end == len(ids)
            receipt = DecodeReceipt(worker, pulled_tokens=len(job.tokens), steps=len(ids)) if last else None
            tokens = tuple(ids[start:end])
            told = () if job.sampling.logprobs is None else _logprobs(tokens, job.sampling.logprobs)
            chunks.append(
                TokenChunk(job.request_id, start, tokens, reason if last else None, None, receipt, told)
            )
        return chunks


def _logprobs(tokens: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
    """-0.5 for every token, and as alternatives the token itself and its neighbours."""
    return tuple(TokenLogprob(-0.5, tuple((token + i, -0.5 - i) for i in range(top))) for token in tokens)


def _prompt_logprobs(tokens: TokenIds, top: int) -> PromptLogprobs:
    rows = len(tokens) - 1
    return PromptLogprobs(
        np.full(rows, -0.25, np.float32),
        np.tile(np.arange(top, dtype=np.int32), (rows, 1)),
        np.full((rows, top), -1.0, np.float32),
    )
