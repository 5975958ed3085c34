"""The request, top to bottom: place, prefill, decode; one deadline, one retry, and going on after a death.

A worker lost before the first token costs one retry elsewhere. One lost later costs a pause: prompt and delivered
tokens are prefilled again and decoding goes on at the next offset, so nothing is lost and nothing comes twice. A worker
that drains hands over in the same way; that is no loss, so only the deadline limits how often it may happen.
Closing the generator (the client has gone) cancels whatever call is running and gives back an unpulled lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Final

from epdserve.services.errors import (
    Draining,
    Internal,
    LeaseLost,
    ServiceError,
    Unavailable,
)
from epdserve.services.policy.forecast import LengthForecast
from epdserve.services.router.attempts import (
    attempt_id,
    heed_cancellation,
    named,
    prefilled_tokens,
    remaining_s,
)
from epdserve.services.router.cluster import Cluster
from epdserve.services.router.decoding import Decoding
from epdserve.services.router.fleets import Life, root_of
from epdserve.services.router.foresight import Foresight
from epdserve.services.router.image_calls import ImageCalls
from epdserve.services.router.ledger import InFlightLedger
from epdserve.services.router.request import GenerateRequest, Trail, now
from epdserve.services.router.routing import Placer, Route
from epdserve.services.schedule import UNHURRIED, Schedule
from epdserve.services.types import (
    DecodeJob,
    FinishReason,
    KVHandle,
    PrefillJob,
    PrefillResult,
    TokenChunk,
    TokenIds,
    token_ids,
)

_POLL_S: Final = 0.05
# Before the first token; what comes after is bounded by max_resumes
_RETRIES: Final = 1


@dataclass(frozen=True, slots=True)
class PipelineLimits:
    """How patient the pipeline is; meanings as in ``RouterConfig`` and its ``images``."""

    decode_stall_s: float = 60.0
    replacement_wait_s: float = 20.0
    release_timeout_s: float = 2.0
    max_resumes: int = 3
    encode_first: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Where a choice decodes, and the prompt's KV that waits for it there to be pulled."""

    route: Route
    handle: KVHandle


class Pipeline:
    """Runs requests on a cluster. Owned by the event loop."""

    def __init__(
        self,
        cluster: Cluster,
        placer: Placer,
        ledger: InFlightLedger,
        limits: PipelineLimits,
        foresight: Foresight | None = None,
    ) -> None:
        self._foresight = foresight
        self._cluster = cluster
        self._placer = placer
        self._ledger = ledger
        self._limits = limits
        self._images = ImageCalls(cluster, encode_first=limits.encode_first)

    def takes_images(self) -> bool:
        """Whether any worker embeds images now."""
        return self._images.takes_images()

    async def generate(
        self, request: GenerateRequest, trail: Trail, start: Start | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        """Tokens of a request, in order, offsets without gaps; the last chunk has a finish reason.

        Must be closed (``aclosing``). Writes what happens into ``trail``. For several choices see ``choices.py``.

        Args:
            start: A prefill that has been done already.

        Raises:
            ServiceError: It ends in no other way; never with an error inside a chunk.
        """
        emitted = trail.drawn
        loop = asyncio.get_running_loop()
        lost: set[Life] = set()
        forecast = self._placer.estimates.forecast(request)
        while True:
            if start is None:
                route, handle = await self._place(request, emitted, lost, trail, forecast), None
            else:
                route, handle, start = start.route, start.handle, None
            expected = forecast.mean
            held = self._ledger.hold(
                route.decode.worker,
                len(request.tokens) + len(emitted) + int(expected),
                output_tokens=expected,
            )
            try:
                # Both workers count the request from the start: it is coming to them
                with held:
                    job = await self._job(route, handle, request, trail, forecast)
                    async with self._decoding(route, job, request, trail) as output:
                        while True:
                            chunk = await output.next()
                            if not emitted and self._foresight is not None:
                                self._foresight.began(request)
                            emitted.extend(chunk.tokens)
                            yield chunk
                            if chunk.finish_reason is not None:
                                # In the loop's next round: the client's last bytes go out first
                                decoded_s = now() - (trail.first_token_at or now())
                                loop.call_soon(self._learn, request, route, chunk, len(emitted), decoded_s)
                                return
            except Unavailable as error:
                heed_cancellation()
                self._note_loss(error, route, bool(emitted), lost, trail)
            if len(emitted) >= request.sampling.max_tokens:
                # The last token came and its finish reason died with the worker
                yield TokenChunk(request.request_id, len(emitted), (), FinishReason.LENGTH)
                return

    async def prefill_for_all(self, request: GenerateRequest, trail: Trail) -> list[Start]:
        """One prefill for all choices of a request, with a lease each; one retry elsewhere.

        Raises:
            ServiceError: It failed twice, or nothing can take it.
        """
        lost: set[Life] = set()
        forecast = self._placer.estimates.forecast(request)
        while True:
            route = await self._place(request, [], lost, trail, forecast)
            try:
                result = await self._prefill(route, request.tokens, request, trail, forecast)
            except Unavailable as error:
                heed_cancellation()
                self._note_loss(error, route, False, lost, trail)
                continue
            return [Start(route, handle) for handle in result.handles]

    async def _place(
        self,
        request: GenerateRequest,
        emitted: list[int],
        lost: set[Life],
        trail: Trail,
        forecast: LengthForecast,
    ) -> Route:
        """A route; where workers were a moment ago, wait a while for their replacement rather than fail."""
        loop = asyncio.get_running_loop()
        since = loop.time() if lost else self._placer.placed_at
        give_up_at = min(request.deadline_at, since + self._limits.replacement_wait_s)
        while True:
            try:
                route = await self._placer.place(
                    prefilled_tokens(request, emitted),
                    tenant_key=request.tenant_key,
                    forecast=forecast,
                    request_id=request.request_id,
                    avoid=lost,
                    images=request.image_digests,
                    targets=request.slo,
                    deterministic=request.deterministic,
                    root=trail.root if request.deterministic and emitted else b"",
                )
            except Unavailable:
                if loop.time() >= give_up_at:
                    raise
                await asyncio.sleep(_POLL_S)
                continue
            if self._foresight is not None and not (emitted or lost):
                self._foresight.admit(request, route, forecast)
            trail.placed_at = trail.placed_at or now()
            trail.root = trail.root or root_of(route.prefill, deterministic=request.deterministic)
            trail.prefill_worker, trail.decode_worker = route.prefill.worker, route.decode.worker
            return route

    def _note_loss(
        self, error: ServiceError, route: Route, started: bool, lost: set[Life], trail: Trail
    ) -> None:
        """Count a loss and avoid the life that was lost.

        Raises:
            ServiceError: The loss, when there have been too many.
        """
        known = len(lost)
        for info in (route.prefill, route.decode):
            # A lost lease is nobody's death: the same worker may prefill again
            if info.worker == error.worker and not isinstance(error, LeaseLost):
                lost.add((info.worker, info.incarnation))
                trail.lost_workers.append(info.worker)
        if isinstance(error, Draining) and len(lost) > known:
            trail.handovers += 1  # each life says so once, so this ends
            return
        if started:
            trail.resumes += 1
            if trail.resumes > self._limits.max_resumes:
                raise error
        else:
            trail.retries += 1
            if trail.retries > _RETRIES:
                raise error

    async def _job(
        self,
        route: Route,
        handle: KVHandle | None,
        request: GenerateRequest,
        trail: Trail,
        forecast: LengthForecast,
    ) -> DecodeJob:
        """What the decode worker is to do, after a prefill unless there is a handle."""
        emitted = trail.drawn
        if handle is None:
            alone = request if request.n == 1 else replace(request, n=1)
            tokens = prefilled_tokens(request, emitted)
            handle = (await self._prefill(route, tokens, alone, trail, forecast)).handle
        return DecodeJob(
            attempt_id(request, trail),
            request.tokens,
            request.tenant_key,
            request.exact,
            request.sampling,
            handle,
            token_ids(emitted),
            request.trace,
            request.grammar,
            remaining_s(request.deadline_at),
            request.keep_tail,
            request.placed_images,
            self._schedule(request, forecast),
            request.deterministic,
        )

    def _decoding(self, route: Route, job: DecodeJob, request: GenerateRequest, trail: Trail) -> Decoding:
        return Decoding(
            self._cluster,
            route.decode.worker,
            job,
            trail,
            deadline_at=request.deadline_at,
            stall_s=self._limits.decode_stall_s,
            failed=self._note_failure,
            give_back=self.give_back,
        )

    async def _prefill(
        self,
        route: Route,
        tokens: TokenIds,
        request: GenerateRequest,
        trail: Trail,
        forecast: LengthForecast,
    ) -> PrefillResult:
        worker = route.prefill.worker
        job = PrefillJob(
            attempt_id(request, trail),
            tokens,
            request.tenant_key,
            request.exact,
            request.trace,
            request.n,
            # Told once, of the prompt: a resumed request has told them
            request.prompt_logprobs if len(tokens) == len(request.tokens) else None,
            request.tail_at,
            self._images.assign(request.images, route.prefill),
            self._schedule(request, forecast),
            request.deterministic,
        )
        with self._ledger.hold(worker, max(1, len(tokens) - route.hit_tokens)):
            try:
                with trail.waiting():
                    result = await self._prefilled(worker, job, request)
            except ServiceError as error:
                if error.worker in (None, worker):
                    self._note_failure(error, worker)
                raise named(error, worker) from error
        self._placer.estimates.prefilled(worker, result, expected_hit_tokens=route.hit_tokens)
        trail.prefill = trail.prefill or result
        trail.prefilled_at = trail.prefilled_at or now()
        return result

    async def _prefilled(self, worker: str, job: PrefillJob, request: GenerateRequest) -> PrefillResult:
        timeout_s = remaining_s(request.deadline_at)
        prefill = self._cluster.prefill(worker, job, timeout_s=timeout_s)
        if not job.images:
            return await prefill
        return await self._images.beside(
            prefill, job.request_id, request.images, job.images, timeout_s=timeout_s, trace=job.trace
        )

    def _learn(
        self, request: GenerateRequest, route: Route, chunk: TokenChunk, tokens: int, decoded_s: float
    ) -> None:
        assert chunk.finish_reason is not None
        self._placer.estimates.answered(request, tokens, chunk.finish_reason)
        if self._foresight is not None:
            self._foresight.answered(request, tokens, decoded_s=decoded_s)
        if chunk.receipt is not None:
            worker = chunk.receipt.worker
            # Its own part of the ledger has been given back by now
            beside = self._ledger.requests(worker)
            self._placer.estimates.decoded(worker, chunk.receipt, running=beside + 1)
            same = route.prefill.machine == route.decode.machine
            self._placer.estimates.handed_over(chunk.receipt, same_machine=same)

    def _note_failure(self, error: ServiceError, worker: str) -> None:
        """A worker that fails is avoided for a while; a request that was refused or out of time is no failure."""
        if isinstance(error, (Internal, Unavailable)) and not isinstance(error, (LeaseLost, Draining)):
            self._placer.estimates.failed(worker)

    def _schedule(self, request: GenerateRequest, forecast: LengthForecast) -> Schedule:
        return UNHURRIED if self._foresight is None else self._foresight.schedule(request, forecast)

    async def give_back(self, handle: KVHandle) -> None:
        """End a lease nobody pulls any more; a lease that cannot be ended ends by itself."""
        try:
            await self._cluster.release(handle, timeout_s=self._limits.release_timeout_s)
        except ServiceError:
            return
