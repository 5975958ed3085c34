"""Decode tasks drawn from a table of logits instead of a model: the sampler's and the grammars' half of a worker."""

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from epdserve.kvstore.clock import Clock
from epdserve.model.backbone import Backbone
from epdserve.services.decode.grammar import Constraints
from epdserve.services.decode.sampler import Sampler
from epdserve.services.decode.task import DecodeTask, Phase
from epdserve.services.grammar.compiler import GrammarCompiler
from epdserve.services.sampling import Grammar, SamplingParams, TokenLogprob
from epdserve.services.types import DecodeJob, FinishReason, token_ids
from support.grammars import EOS_ID, byte_vocabulary
from support.manual_clock import ManualClock

VOCABULARY = 512


def table() -> torch.Tensor:
    """Logits (512, 512) after each token; nothing else of the prompt matters."""
    return torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3


def task(
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    emitted: Sequence[int] = (),
    grammar: Grammar | None = None,
) -> DecodeTask:
    """A task whose KV is here."""
    job = DecodeJob(
        request_id="r",
        tokens=token_ids(prompt),
        tenant_key=b"t",
        exact=False,
        sampling=sampling,
        handle=None,
        emitted=token_ids(emitted),
        grammar=grammar,
    )
    made = DecodeTask.of(job, eos_token_id=EOS_ID, max_context_tokens=10_000, now=0.0)
    made.phase = Phase.RUNNING
    return made


class ToyWorker:
    """Draws for tasks together until each has ended.

    Attributes:
        reasons: By task, how it ended.
        told: By task, what was told about its tokens.
    """

    def __init__(self, compiler: GrammarCompiler | None = None, clock: Clock | None = None) -> None:
        self.compiler = GrammarCompiler(byte_vocabulary) if compiler is None else compiler
        self.constraints = Constraints(self.compiler, clock=clock or ManualClock(), wake=lambda: None)
        self.table = table()
        self.sampler = Sampler(cast(Backbone, self._backbone()))
        self.reasons: dict[DecodeTask, FinishReason] = {}
        self.told: dict[DecodeTask, list[TokenLogprob]] = {}

    def _backbone(self) -> Any:
        config = SimpleNamespace(text=SimpleNamespace(vocab_size=VOCABULARY))
        return SimpleNamespace(
            device=torch.device("cpu"),
            config=config,
            logits=lambda exit_RD: self.table[exit_RD[:, 0].long()],
        )

    def run(self, tasks: Sequence[DecodeTask]) -> list[list[int]]:
        """New tokens of each task."""
        began = [each.request.length for each in tasks]
        for each in tasks:
            if each.constraint is not None:
                self.constraints.begin(each)
        while self.constraints.compiling:
            self._settle()
        while running := [each for each in tasks if not each.ended]:
            self._step(running)
        return [
            each.request.tokens[start : each.request.length].tolist()
            for each, start in zip(tasks, began, strict=True)
        ]

    def _settle(self) -> None:
        time.sleep(0.001)
        for ended, error in self.constraints.settle():
            if error is not None:
                raise error
            self._end(ended, FinishReason.STOP)

    def _step(self, running: Sequence[DecodeTask]) -> None:
        self.constraints.start_masks([each.constraint for each in running if each.constraint is not None])
        last = [[float(each.request.tokens[each.request.length - 1])] for each in running]
        drawn = self.sampler.draw(running, torch.tensor(last), self.constraints.take_masks())
        for row, (each, token) in enumerate(zip(running, drawn.tokens, strict=True)):
            if each.constraint is not None and each.constraint.error is not None:
                raise each.constraint.error
            each.request.append(token)
            if each.constraint is not None:
                each.constraint.follow()
            if row in drawn.logprobs:
                self.told.setdefault(each, []).append(drawn.logprobs[row])
            if (reason := each.finish_reason(token)) is not None:
                self._end(each, reason)

    def _end(self, ended: DecodeTask, reason: FinishReason) -> None:
        ended.phase = Phase.ENDED
        self.reasons[ended] = reason

    def close(self) -> None:
        self.constraints.close()


def logits_after(output: Sequence[int], prompt: Sequence[int]) -> list[np.ndarray]:
    """What the table says before each token of an output."""
    before = [prompt[-1], *output[:-1]]
    rows = table()
    return [rows[token].numpy() for token in before]
