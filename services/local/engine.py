"""All roles in one process, without servers: for ``epdserve generate``, for tests, and as the measure of the pools.

The same prefill and decode workers run here, with pages of their own each, so prefix hits, replays and tokens are those
of two processes. Both share one model and one step loop, and bytes move by ``memmove``.

There is no store: it is what outlives a worker, and here everything ends together. SSD directories have one owner, so a
``generate`` beside a server could not open the server's, and what it wrote into its own would hardly be read.
"""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from epdserve.kvstore.clock import SystemClock
from epdserve.kvstore.lease import LeaseTable
from epdserve.kvstore.transfer.local import LocalFabric, LocalTransfer
from epdserve.kvstore.types import LeaseId
from epdserve.model.backbone import Backbone
from epdserve.services.decode.admission import Admission
from epdserve.services.decode.grammar import Constraints
from epdserve.services.decode.ingest import Ingest
from epdserve.services.decode.preemption import SwapSpace
from epdserve.services.decode.pulling import PullDriver
from epdserve.services.decode.worker import DecodeWorker
from epdserve.services.engine.config import EngineSettings
from epdserve.services.engine.loop_thread import LoopThread
from epdserve.services.engine.metrics import EngineMetrics
from epdserve.services.engine.runner import Runner
from epdserve.services.engine.step_loop import StepLoop
from epdserve.services.engine.transfer_thread import TransferThread
from epdserve.services.engine.validation import RequestLimits
from epdserve.services.errors import Internal, InvalidRequest, ServiceError
from epdserve.services.local.config import LocalSettings
from epdserve.services.local.images import LocalImages
from epdserve.services.local.peers import LocalPeers
from epdserve.services.prefill.task import PrefillTask
from epdserve.services.prefill.worker import PrefillWorker
from epdserve.services.router.images.pictures import PromptImage
from epdserve.services.sampling import Grammar, TokenLogprob
from epdserve.services.types import (
    DecodeJob,
    DecodeReceipt,
    FinishReason,
    PrefillJob,
    PrefillResult,
    SamplingParams,
    TokenChunk,
    token_ids,
)

_NAME, _LIFE = "local", "1"
_DEADLINE_S = 10.0
_LEASE_TTL_S = 86_400.0  # nobody can be lost here, and a long queue is no reason to compute twice
TENANT_KEY = b"local"

Prompt = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer.

    Attributes:
        tokens: Drawn ids, a stop token included.
        logprobs: One for each token if the sampling asks for them, else empty.
        prefill: What the prefill did: hit, replayed rows, milliseconds.
        receipt: What the decoding did.
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    prefill: PrefillResult
    receipt: DecodeReceipt
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True, eq=False)
class _Request:
    on_tokens: Callable[[tuple[int, ...]], None] | None
    done: Future[Generation] = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prefill: PrefillResult | None = None


class LocalEngine:
    """A prefill and a decode worker in this process. Thread-safe; use as a context, or ``close`` it.

    Args:
        model_dir: In the published format.
        settings: Defaults suit the demo model; ``model_dir`` wins over theirs.
    """

    def __init__(self, model_dir: Path | str, settings: LocalSettings | None = None) -> None:
        settings = settings or LocalSettings(engine=EngineSettings(model_dir=Path(model_dir)))
        engine = settings.engine
        torch.set_num_threads(engine.threads)
        backbone = Backbone.load(model_dir, precision=engine.precision, device=engine.device)
        self._clock, self._leases = SystemClock(), LeaseTable()
        self._fabric, self._events = LocalFabric(), LoopThread("local-events")
        self._numbers = itertools.count()
        self._requests: dict[str, _Request] = {}
        self.prefill_runner = Runner(backbone, engine, clock=self._clock)
        self.decode_runner = Runner(backbone, engine, clock=self._clock)
        self._steps = StepLoop("local-steps", self._step, clock=self._clock, on_crash=self._crashed)
        self._images = LocalImages.of_model(
            self._events, backbone.config, engine, worker=_NAME, incarnation=_LIFE
        )
        self._prefill = PrefillWorker(
            self.prefill_runner,
            engine,
            self._leases,
            worker=_NAME,
            incarnation=_LIFE,
            lease_ttl_s=_LEASE_TTL_S,
            images=self._images,
        )
        if self._images is not None:
            self._images.bind(self._steps, self._prefill)
        self._transfers = TransferThread(
            self._transfer("local-decode", self.decode_runner), clock=self._clock
        )
        self._open_decode(settings, self._transfer(_NAME, self.prefill_runner))
        self._transfers.start()
        self._steps.start()

    def __enter__(self) -> "LocalEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        exact: bool = False,
        deterministic: bool = False,
        tenant_key: bytes = TENANT_KEY,
        grammar: Grammar | None = None,
        images: Sequence[Sequence[PromptImage]] = (),
        on_tokens: Callable[[int, tuple[int, ...]], None] | None = None,
        timeout_s: float = 600.0,
    ) -> list[Generation]:
        """Answer all prompts, batched together.

        Args:
            prompts: Token ids of each.
            sampling: For all, or one for each.
            exact: Take no prefix hit and drop no row.
            deterministic: Answers whose bits do not depend on what is cached.
            tenant_key: Prefix hits happen between prompts of one key.
            grammar: What each answer must look like.
            images: Of each prompt, in their places; empty if none has any.
            on_tokens: Told (prompt's index, new tokens) in the step loop's thread; must not block.
            timeout_s: For all of them together.

        Raises:
            InvalidRequest: A prompt cannot be run, an image is damaged, or the grammar cannot be used.
            TimeoutError: It took longer.
        """
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        listeners = [partial(on_tokens, index) if on_tokens else None for index in range(len(prompts))]
        started = [
            self._start(prompt, params, exact, deterministic, tenant_key, grammar, shown, listener)
            for prompt, params, shown, listener in zip(
                prompts, each, images or [()] * len(prompts), listeners, strict=True
            )
        ]
        return [request.done.result(timeout_s) for request in started]

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt that is taken."""
        return self._prefill.max_context_tokens

    def leaked_pages(self) -> int:
        """Pages and slots held although nothing runs; 0 unless something was forgotten."""
        return self.prefill_runner.leaked_pages() + self.decode_runner.leaked_pages()

    def close(self) -> None:
        """Stop; requests under way end with an error."""
        if self._steps.running:
            self._steps.call(self._stop_work).result(_DEADLINE_S)
        if self._images is not None:
            self._images.close()
        self._events.run(self._driver.stop(), timeout_s=_DEADLINE_S)
        self._steps.stop(timeout_s=_DEADLINE_S)
        self._transfers.stop(timeout_s=_DEADLINE_S)
        self._events.stop()
        self._constraints.close()

    def _transfer(self, name: str, runner: Runner) -> LocalTransfer:
        transfer = LocalTransfer(self._fabric, name)
        for region in runner.regions():
            transfer.register(region)
        return transfer

    def _open_decode(self, settings: LocalSettings, source: LocalTransfer) -> None:
        runner, metrics = self.decode_runner, EngineMetrics.unregistered()
        self._driver = PullDriver(
            self._events.loop,
            self._transfers,
            LocalPeers(source, self._leases, {_NAME: _LIFE}),
            deadline_s=_DEADLINE_S,
            lease_call_deadline_s=_DEADLINE_S,
        )
        admission = Admission(
            runner,
            Ingest(runner, self._transfers, self._driver),
            SwapSpace(runner, limit_bytes=settings.swap_memory_bytes),
            self._driver,
            submit=self._steps.submit,
            metrics=metrics,
        )
        self._constraints = Constraints.of_model(
            settings.engine.model_dir,
            vocab_size=runner.backbone.config.text.vocab_size,
            eos_token_id=runner.backbone.config.eos_token_id,
            clock=self._clock,
            wake=self._steps.wake,
        )
        self._decode = DecodeWorker(
            runner,
            admission,
            RequestLimits.of(runner, settings.engine),
            worker=_NAME,
            publish=self._take,
            chunk_tokens=settings.engine.chunk_tokens,
            max_queued=settings.engine.max_queued,
            constraints=self._constraints,
            metrics=metrics,
        )

    def _step(self) -> bool:
        prefilled = self._prefill.step()
        return self._decode.step() or prefilled

    def _start(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        exact: bool,
        deterministic: bool,
        tenant_key: bytes,
        grammar: Grammar | None,
        images: Sequence[PromptImage],
        on_tokens: Callable[[tuple[int, ...]], None] | None,
    ) -> _Request:
        name = f"local-{next(self._numbers)}"
        request = _Request(on_tokens)
        tokens = token_ids(np.asarray(prompt, dtype=np.int64))
        placed = self._images.place(images) if self._images is not None and images else ()
        if len(placed) < len(images):
            raise InvalidRequest("this model takes no images", param="messages")
        prefill = PrefillJob(name, tokens, tenant_key, exact, images=placed, deterministic=deterministic)
        task = self._prefill.new_task(prefill)

        def prefilled(done: Future[PrefillResult]) -> None:
            """In the step loop, like everything that ends a prefill."""
            try:
                request.prefill = result = done.result(0)
                decode = DecodeJob(
                    name,
                    tokens,
                    tenant_key,
                    exact,
                    sampling,
                    result.handle,
                    grammar=grammar,
                    images=placed,
                    deterministic=deterministic,
                )
                self._decode.enqueue(self._decode.new_task(decode))
            except ServiceError as error:
                if request.prefill is not None:
                    self._leases.end(LeaseId(request.prefill.handle.lease))
                self._end(name, error)

        self._requests[name] = request
        task.done.add_done_callback(prefilled)
        self._steps.submit(lambda: self._prefill.enqueue(task))
        if self._images is not None and images:
            self._images.encode(name, images, lambda error: self._give_up(name, task, error))
        return request

    def _give_up(self, name: str, task: PrefillTask, error: ServiceError) -> None:
        """End a request one of whose images cannot be embedded; on the event loop."""

        def end() -> None:
            # Out of the books before the cancellation speaks, and told once nothing is held for it any more
            request = self._requests.pop(name, None)
            self._prefill.cancel(task)
            if request is not None:
                request.done.set_exception(error)

        self._steps.submit(end)

    def _take(self, chunks: Sequence[TokenChunk]) -> None:
        for chunk in chunks:
            request = self._requests[chunk.request_id]
            request.tokens += chunk.tokens
            request.logprobs += chunk.logprobs
            if chunk.tokens and request.on_tokens is not None:
                request.on_tokens(chunk.tokens)
            if chunk.error is not None:
                self._end(chunk.request_id, chunk.error.to_error())
            elif chunk.finish_reason is not None:
                assert chunk.receipt is not None
                assert request.prefill is not None
                generation = Generation(
                    tuple(request.tokens),
                    chunk.finish_reason,
                    request.prefill,
                    chunk.receipt,
                    tuple(request.logprobs),
                )
                del self._requests[chunk.request_id]
                request.done.set_result(generation)

    def _end(self, name: str, error: ServiceError) -> None:
        request = self._requests.pop(name, None)
        if request is not None:
            request.done.set_exception(error)

    def _stop_work(self) -> None:
        error = Internal("the engine was closed")
        self._prefill.fail_all(error)
        self._decode.fail_all(error)
        self._leases.end_all()

    def _crashed(self, error: BaseException) -> None:
        for name in list(self._requests):
            self._end(name, Internal(f"the step loop crashed: {error}"))
