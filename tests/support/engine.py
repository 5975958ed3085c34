"""Small workers over the tiny golden model, and what they must produce by an independent path."""

from collections.abc import Sequence

import numpy as np
import torch
from epdserve.kvstore.lease import LeaseTable
from epdserve.model.backbone import Backbone
from epdserve.model.batch import ForwardBatch, Outputs, Segment
from epdserve.model.pools import KVPools
from epdserve.model.replay import plan_prefill
from epdserve.services.engine.config import EngineSettings
from epdserve.services.engine.runner import Runner
from epdserve.services.prefill.worker import PrefillTask, PrefillWorker
from epdserve.services.types import PrefillJob, PrefillResult, token_ids

from support.golden import TINY, tiny

TENANT = b"tenant-a"
BLOCK_TOKENS = 8  # also the tiny model's window; a multiple of the ratio


class ManualClock:
    """Time that stands until a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


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


class PrefillBench:
    """A prefill worker driven by hand."""

    def __init__(self, *, lease_ttl_s: float = 30.0, **changes: object) -> None:
        self.clock = ManualClock()
        self.runner = make_runner(self.clock, **changes)
        self.leases = LeaseTable(self.clock)
        self.worker = PrefillWorker(
            self.runner,
            settings(**changes),
            self.leases,
            worker="prefill-0",
            incarnation="1",
            lease_ttl_s=lease_ttl_s,
        )

    def submit(
        self, tokens: Sequence[int] | np.ndarray, *, exact: bool = False, tenant: bytes = TENANT
    ) -> PrefillTask:
        task = self.worker.new_task(PrefillJob("r", token_ids(np.asarray(tokens)), tenant, exact))
        self.worker.enqueue(task)
        return task

    def run(self, tokens: Sequence[int] | np.ndarray, *, exact: bool = False) -> PrefillResult:
        """Prefill one prompt to its end."""
        task = self.submit(tokens, exact=exact)
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
        span = plan_prefill(prompt_tokens=len(tokens), hit_tokens=hit, window=self.window, exact=exact)
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
    reference = Reference(tiny("f32q"), len(tokens) + new_tokens)
    return reference.greedy(tokens, new_tokens, exact=exact)
