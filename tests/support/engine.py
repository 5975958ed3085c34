"""Small workers over the tiny golden model, and what they must produce by an independent path."""

import itertools
import queue
import time
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from epdserve.kvstore.clock import SystemClock
from epdserve.kvstore.lease import LeaseTable
from epdserve.kvstore.transfer.local import LocalFabric, LocalTransfer
from epdserve.model.backbone import Backbone
from epdserve.model.batch import ForwardBatch, Outputs, Segment
from epdserve.model.pools import KVPools
from epdserve.model.replay import PrefillSpan, plan_prefill
from epdserve.services.decode.admission import Admission
from epdserve.services.decode.grammar import Constraints
from epdserve.services.decode.ingest import Ingest
from epdserve.services.decode.preemption import SwapSpace
from epdserve.services.decode.pulling import PullDriver
from epdserve.services.decode.worker import DecodeWorker
from epdserve.services.engine.config import EngineSettings
from epdserve.services.engine.loop_thread import LoopThread
from epdserve.services.engine.metrics import EngineMetrics
from epdserve.services.engine.onboard import FoundTail
from epdserve.services.engine.requests import RunningRequest
from epdserve.services.engine.runner import Runner
from epdserve.services.engine.tail_fetch import StagedTail
from epdserve.services.engine.transfer_thread import TransferThread
from epdserve.services.engine.validation import RequestLimits
from epdserve.services.grammar.compiler import GrammarCompiler
from epdserve.services.local.peers import LocalPeers
from epdserve.services.prefill.task import PrefillTask
from epdserve.services.prefill.worker import PrefillWorker
from epdserve.services.schedule import UNHURRIED, Schedule
from epdserve.services.types import (
    DecodeJob,
    PrefillJob,
    PrefillResult,
    SamplingParams,
    TokenChunk,
    token_ids,
)
from support.golden import TINY, tiny
from support.grammars import byte_vocabulary
from support.manual_clock import ManualClock

TENANT = b"tenant-a"
BLOCK_TOKENS = 8  # also the tiny model's window; a multiple of the ratio


def settings(**changes: object) -> EngineSettings:
    """Settings of a small worker."""
    values: dict[str, object] = {
        "model_dir": TINY,
        "block_tokens": BLOCK_TOKENS,
        "num_pages": 96,
        "max_running": 8,
        "staging_slots": 16,
        "chunk_tokens": 64,
    }
    return EngineSettings.model_validate(values | changes)


def make_runner(clock: ManualClock | None = None, **changes: object) -> Runner:
    """A runner over the tiny model."""
    return Runner(tiny("f32q"), settings(**changes), clock=clock or ManualClock())


def prompt(length: int, seed: int = 0) -> np.ndarray:
    """Random ordinary token ids."""
    return np.random.default_rng([seed, 7]).integers(10, 500, length)


class TailShelf:
    """Takes what a worker would offer to the store of its machine, and keeps the tails."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.tails: dict[int, FoundTail] = {}  # by position
        self.touched: list[list[bytes]] = []

    def offer_tail(self, request: RunningRequest) -> None:
        record = torch.empty(self.runner.tail_layout.nbytes, dtype=torch.uint8)
        checksum = self.runner.write_tail(request, record, None)
        position = request.next_row
        self.tails[position] = FoundTail(position, record, checksum, request.is_exact(position))

    def touch(self, hashes: list[bytes]) -> None:
        self.touched.append(list(hashes))


class PrefillBench:
    """A prefill worker driven by hand."""

    def __init__(self, *, lease_ttl_s: float = 30.0, **changes: object) -> None:
        self.clock = ManualClock()
        self.runner = make_runner(self.clock, **changes)
        self.shelf = TailShelf(self.runner)
        self.leases = LeaseTable(self.clock)
        self.worker = PrefillWorker(
            self.runner,
            settings(**changes),
            self.leases,
            worker="prefill-0",
            incarnation="1",
            lease_ttl_s=lease_ttl_s,
            offloader=self.shelf,  # type: ignore[arg-type]
        )

    def submit(
        self,
        tokens: Sequence[int] | np.ndarray,
        *,
        exact: bool = False,
        tenant: bytes = TENANT,
        tail_at: int | None = None,
        tail: FoundTail | None = None,
        schedule: Schedule = UNHURRIED,
        deterministic: bool = False,
    ) -> PrefillTask:
        """Queue a prompt; ``tail`` is what was brought up for it."""
        job = PrefillJob(
            "r",
            token_ids(np.asarray(tokens)),
            tenant,
            exact,
            tail_at=tail_at,
            schedule=schedule,
            deterministic=deterministic,
        )
        task = self.worker.new_task(job)
        if tail is not None:
            staging = self.runner.staging_slots.acquire()
            assert staging is not None
            task.prepared.tail = StagedTail(tail, staging)
        self.worker.enqueue(task)
        return task

    def run(
        self,
        tokens: Sequence[int] | np.ndarray,
        *,
        exact: bool = False,
        tail_at: int | None = None,
        tail: FoundTail | None = None,
        deterministic: bool = False,
    ) -> PrefillResult:
        """Prefill one prompt to its end."""
        task = self.submit(tokens, exact=exact, tail_at=tail_at, tail=tail, deterministic=deterministic)
        while self.worker.step():
            pass
        return task.done.result(timeout=0)

    def end_leases(self) -> None:
        self.leases.end_all()

    def assert_nothing_leaked(self) -> None:
        assert self.leases.counts().held == 0
        assert self.runner.leaked_pages() == 0


class Reference:
    """One request on the model alone: whole prompt in one step, then single tokens. No engine, no pages shared."""

    def __init__(self, backbone: Backbone, room: int, *, block_tokens: int = BLOCK_TOKENS) -> None:
        self.backbone = backbone
        layout = backbone.layout(block_tokens)
        self.pages = list(range(-(-room // block_tokens)))
        self.pools = KVPools(backbone.config, layout, num_pages=len(self.pages), num_slots=1)
        self.shape = backbone.batch_shape(layout)
        self.window = backbone.config.text.sliding_window

    def prefill(self, tokens: np.ndarray, *, hit: int = 0, exact: bool = False) -> torch.Tensor:
        """Exit vector (hidden,) of the last row; with a hit, the blocks before it must have been run already."""
        span = plan_prefill(prompt_tokens=len(tokens), hit_tokens=hit, window=self.window)
        if exact:  # every row in every layer
            span = PrefillSpan(0, 0, 0, 0, 0)
        segment = Segment(
            tokens.astype(np.int64),
            span.first_row,
            len(tokens) - span.first_row,
            self.pages,
            0,
            span.encoder_floor,
            span.decoder_from,
            span.decoder_floor,
            span.publish_from,
            Outputs.LAST,
        )
        return self.backbone.forward(ForwardBatch.build([segment], self.shape), self.pools)[0]

    def greedy(self, tokens: np.ndarray, new_tokens: int, *, hit: int = 0, exact: bool = False) -> list[int]:
        """The next ``new_tokens`` tokens of largest logit."""
        known = np.concatenate([tokens.astype(np.int64), np.zeros(new_tokens, dtype=np.int64)])
        exit_D, out = self.prefill(tokens, hit=hit, exact=exact), []
        for position in range(len(tokens), len(known)):
            token = int(self.backbone.logits(exit_D[None])[0].argmax())
            out.append(token)
            known[position] = token
            if len(out) < new_tokens:
                step = Segment(known, position, 1, self.pages, 0)
                exit_D = self.backbone.forward(ForwardBatch.build([step], self.shape), self.pools)[0]
        return out


def greedy_reference(tokens: np.ndarray, new_tokens: int, *, exact: bool = False) -> list[int]:
    """Greedy continuation of a cold prompt by the tiny model alone."""
    return list(_greedy_reference(tuple(tokens.tolist()), new_tokens, exact))


@cache
def _greedy_reference(tokens: tuple[int, ...], new_tokens: int, exact: bool) -> list[int]:
    reference = Reference(tiny("f32q"), len(tokens) + new_tokens)
    return reference.greedy(np.array(tokens), new_tokens, exact=exact)


class DecodeBench:
    """A decode worker beside a ``PrefillBench``, driven by hand; bytes move over a ``LocalFabric``."""

    def __init__(
        self,
        prefill: PrefillBench | None = None,
        *,
        handoff_deadline_s: float = 5.0,
        swap_memory_bytes: int = 2**26,
        **changes: object,
    ) -> None:
        self.prefill = prefill or PrefillBench()
        self.clock, self.leases, self.fabric = self.prefill.clock, self.prefill.leases, LocalFabric()
        self.runner = make_runner(self.clock, **changes)
        self.shelf = TailShelf(self.runner)
        self.chunks: dict[str, list[TokenChunk]] = {}
        self.steps: list[list[TokenChunk]] = []
        self._commands: queue.Queue[Callable[[], None]] = queue.Queue()
        self._numbers = itertools.count()
        source = self._transfer("prefill-0", self.prefill.runner)
        self.transfers = TransferThread(self._transfer("decode-0", self.runner), clock=SystemClock())
        self.transfers.start()
        self._loop = LoopThread("decode-bench")
        self.incarnations = {"prefill-0": "1"}
        self.driver = PullDriver(
            self._loop.loop,
            self.transfers,
            LocalPeers(source, self.leases, self.incarnations),
            deadline_s=handoff_deadline_s,
            lease_call_deadline_s=1.0,
        )
        self.metrics = EngineMetrics.unregistered()
        self.constraints = Constraints(
            GrammarCompiler(byte_vocabulary),
            clock=self.clock,
            wake=lambda: self._commands.put(lambda: None),
        )
        self.admission = Admission(
            self.runner,
            Ingest(self.runner, self.transfers, self.driver),
            SwapSpace(self.runner, limit_bytes=swap_memory_bytes),
            self.driver,
            submit=self._commands.put,
            metrics=self.metrics,
        )
        engine = settings(**changes)
        self.worker = DecodeWorker(
            self.runner,
            self.admission,
            RequestLimits.of(self.runner, engine),
            worker="decode-0",
            publish=self._publish,
            chunk_tokens=engine.chunk_tokens,
            max_queued=engine.max_queued,
            offloader=self.shelf,  # type: ignore[arg-type]
            constraints=self.constraints,
            metrics=self.metrics,
        )

    def _transfer(self, name: str, runner: Runner) -> LocalTransfer:
        transfer = LocalTransfer(self.fabric, name)
        for region in runner.regions():
            transfer.register(region)
        return transfer

    def _publish(self, chunks: Sequence[TokenChunk]) -> None:
        self.steps.append(list(chunks))
        for chunk in chunks:
            self.chunks.setdefault(chunk.request_id, []).append(chunk)

    def job(self, tokens: np.ndarray, sampling: SamplingParams, **changes: object) -> DecodeJob:
        """A job with a handle from the prefill worker."""
        exact, deterministic = bool(changes.get("exact", False)), bool(changes.get("deterministic", False))
        values: dict[str, object] = {
            "request_id": f"r{next(self._numbers)}",
            "tokens": token_ids(tokens),
            "tenant_key": TENANT,
            "exact": exact,
            "sampling": sampling,
        }
        if "handle" not in changes:
            emitted = np.asarray(changes.get("emitted", ()), dtype=np.int64)
            known = np.concatenate([np.asarray(tokens, dtype=np.int64), emitted])
            known = np.asarray(tokens, dtype=np.int64) if deterministic else known
            values["handle"] = self.prefill.run(known, exact=exact, deterministic=deterministic).handle
        if "emitted" in changes:
            changes["emitted"] = token_ids(np.asarray(changes["emitted"], dtype=np.int64))
        return DecodeJob(**(values | changes))  # type: ignore[arg-type]

    def submit(self, tokens: np.ndarray, sampling: SamplingParams, **changes: object) -> str:
        """Prefill, then queue for decoding; the request's id."""
        job = self.job(tokens, sampling, **changes)
        self.worker.enqueue(self.worker.new_task(job))
        return job.request_id

    def pump(self, *, until: Callable[[], bool] | None = None, wait_s: float = 10.0) -> None:
        """Step until nothing is left to do, or ``until``; waits for pulls."""
        while until is None or not until():
            while not self._commands.empty():
                self._commands.get_nowait()()
            if self.worker.step():
                continue
            waited_for = self.admission.pulling or self.constraints.compiling
            if not waited_for and self._commands.empty():
                return
            self._commands.get(timeout=wait_s)()

    def output(self, request_id: str) -> list[int]:
        """All tokens of a request, checked to follow one another."""
        out: list[int] = []
        first = self.chunks[request_id][0].offset
        for chunk in self.chunks[request_id]:
            assert chunk.offset == first + len(out)
            assert chunk.error is None
            out += chunk.tokens
        return out

    def last(self, request_id: str) -> TokenChunk:
        """The chunk that ended a request."""
        assert [chunk.final for chunk in self.chunks[request_id]].count(True) == 1
        return self.chunks[request_id][-1]

    def generate(self, tokens: np.ndarray, sampling: SamplingParams, **changes: object) -> list[int]:
        """Prefill and decode one request to its end."""
        request_id = self.submit(tokens, sampling, **changes)
        self.pump()
        return self.output(request_id)

    def handoffs(self) -> dict[str, int]:
        """Ended hand-offs by outcome."""
        samples = next(iter(self.metrics.handoffs.collect())).samples
        return {s.labels["outcome"]: int(s.value) for s in samples if s.name.endswith("_total")}

    def settle_leases(self) -> None:
        """Wait until every lease was given back."""
        eventually(lambda: self.leases.counts().held == 0)

    def close(self) -> None:
        """Prove that nothing is left, then stop the threads."""
        try:
            self.settle_leases()
            assert self.worker.tasks == 0
            assert self.runner.leaked_pages() == 0
            eventually(lambda: self.runner.blocks.counts().quarantined == 0)
            assert self.admission.swapped_bytes == 0
            self.prefill.assert_nothing_leaked()
        finally:
            self._loop.run(self.driver.stop(), timeout_s=5.0)
            self.transfers.stop(timeout_s=5.0)
            self._loop.stop()
            self.constraints.close()


def eventually(condition: Callable[[], bool], *, within_s: float = 5.0) -> None:
    """Wait for what another thread does."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def greedy(max_tokens: int, **changes: object) -> SamplingParams:
    """Always the likeliest token, to the end."""
    values: dict[str, object] = {"seed": 0, "temperature": 0.0, "ignore_eos": True}
    return SamplingParams(max_tokens=max_tokens, **(values | changes))  # type: ignore[arg-type]
