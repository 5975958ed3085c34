"""Grammar state of requests: where each output stands in its grammar, and what may come next.

State is a function of the tokens, so nothing of it is handed over or swapped out: the worker that takes a request over
reads the tokens that were emitted, a preempted request keeps its place, and both go on as if nothing had happened.
Masks are made in a thread while the model runs; the library releases Python's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import llguidance
import numpy as np
import numpy.typing as npt
from epdserve.kvstore.clock import Clock
from epdserve.services.errors import Internal, InvalidRequest, ServiceError
from epdserve.services.grammar.compiler import CompilerCounts, GrammarCompiler
from epdserve.services.grammar.source import PARAM, refusal
from epdserve.services.grammar.vocabulary import load_vocabulary
from epdserve.services.sampling import Grammar

if TYPE_CHECKING:
    from epdserve.services.decode.task import DecodeTask
    from epdserve.services.engine.requests import RunningRequest

Words: TypeAlias = npt.NDArray[np.int32]


class Constraint:
    """One request's place in its grammar. Owned by the step loop but while its mask is being made.

    Attributes:
        active: Output is constrained from here on; before, it is free.
        complete: Nothing may follow but an end.
        error: Why it cannot be followed any further.
    """

    def __init__(self, request: RunningRequest, grammar: Grammar, *, prompt_tokens: int) -> None:
        """A place before the first token.

        Raises:
            InvalidRequest: The grammar is to have read more tokens than the prompt has.
        """
        if grammar.read_tokens > prompt_tokens:
            raise InvalidRequest(f"{grammar.read_tokens} of {prompt_tokens} tokens to be read", param=PARAM)
        self.grammar = grammar
        self.active, self.complete = grammar.after_token is None, False
        self.error: ServiceError | None = None
        self._request, self._read = request, prompt_tokens - grammar.read_tokens
        self._matcher: llguidance.LLMatcher | None = None

    @property
    def ready(self) -> bool:
        """Whether the grammar is compiled."""
        return self._matcher is not None

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Tokens that may not come while the output is free."""
        return () if self.active else self.grammar.forbidden_before

    def open(self, compiled: llguidance.LLMatcher) -> None:
        """Begin with a compiled grammar; what the request has emitted is read."""
        self._matcher = compiled.deep_copy()
        self.follow()

    def follow(self) -> None:
        """Read the tokens that are new."""
        assert self._matcher is not None
        ids: list[int] = self._request.tokens[self._read : self._request.length].tolist()
        self._read = self._request.length
        if not self.active:
            if self.grammar.after_token not in ids:
                return
            ids = ids[ids.index(self.grammar.after_token) + 1 :]
            self.active = True
        if ids and not self._matcher.consume_tokens(ids):
            # what was drawn under a mask fits; only tokens from elsewhere may not
            self.error = refusal(self._matcher.get_error() or "the output does not fit it")
        self.complete = self.error is None and self._matcher.is_stopped()

    def mask(self) -> Words | None:
        """(words,) int32, a bit for each token that may come next; None, and ``error``, if the grammar gives up."""
        assert self._matcher is not None
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype="<i4")
        if self._matcher.is_error():
            self.error = refusal(self._matcher.get_error())
            return None
        return words


class Constraints:
    """Grammars of one worker's requests. Owned by the step loop.

    Args:
        wake: Lets an idle step loop step; called from the compiler's thread.
    """

    def __init__(self, compiler: GrammarCompiler, *, clock: Clock, wake: Callable[[], None]) -> None:
        self._compiler, self._clock, self._wake = compiler, clock, wake
        self._compiling: list[tuple[DecodeTask, Future[llguidance.LLMatcher], float]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._masks: Future[list[Words | None]] | None = None
        self._masked: list[Constraint] = []

    @property
    def compiling(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._compiling)

    def begin(self, task: DecodeTask) -> None:
        """Have a task's grammar compiled; its KV may come meanwhile.

        Raises:
            Overloaded: Too many wait for theirs.
        """
        assert task.constraint is not None
        future = self._compiler.compile(task.constraint.grammar)
        give_up_at = self._clock.monotonic() + self._compiler.limits.compile_s
        self._compiling.append((task, future, give_up_at))
        if not future.done():
            future.add_done_callback(lambda _: self._wake())

    def settle(self) -> list[tuple[DecodeTask, ServiceError | None]]:
        """Open what is compiled; returns the tasks that end here: with an error, or complete before the first draw."""
        if not self._compiling:
            return []
        ended, waiting = [], []
        for task, future, give_up_at in self._compiling:
            if task.constraint is None or task.ended:
                continue
            if future.done():
                error = self._open(task.constraint, future)
                if error is not None or task.constraint.complete:
                    ended.append((task, error))
            elif self._clock.monotonic() >= give_up_at:
                seconds = self._compiler.limits.compile_s
                ended.append((task, InvalidRequest(f"no grammar compiled within {seconds} s", param=PARAM)))
            else:
                waiting.append((task, future, give_up_at))
        self._compiling = waiting
        return ended

    def start_masks(self, constraints: Sequence[Constraint]) -> None:
        """Begin to make the masks of the next draw; ``take_masks`` must follow before anything else is drawn."""
        self._masked = [constraint for constraint in constraints if constraint.active]
        if self._masked:
            self._masks = self._thread.submit(lambda work: [each.mask() for each in work], self._masked)

    def take_masks(self) -> dict[Constraint, Words]:
        """The masks; a constraint that has none has an ``error``."""
        if self._masks is None:
            return {}
        made, self._masks = self._masks.result(), None
        return {each: words for each, words in zip(self._masked, made, strict=True) if words is not None}

    @classmethod
    def of_model(
        cls, model_dir: Path, *, vocab_size: int, eos_token_id: int, clock: Clock, wake: Callable[[], None]
    ) -> Constraints:
        """For a model directory; its tokenizer is read when the first grammar comes."""

        def load() -> llguidance.LLTokenizer:
            return load_vocabulary(
                model_dir / "tokenizer.json", vocab_size=vocab_size, eos_token_id=eos_token_id
            )

        return cls(GrammarCompiler(load), clock=clock, wake=wake)

    @property
    def counts(self) -> CompilerCounts:
        """What the cache of compiled grammars did so far."""
        return self._compiler.counts

    @property
    def cached(self) -> int:
        """Compiled grammars that are kept."""
        return len(self._compiler)

    def close(self) -> None:
        """End the threads."""
        self._compiler.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _open(self, constraint: Constraint, future: Future[llguidance.LLMatcher]) -> ServiceError | None:
        error = future.exception()
        if error is None:
            constraint.open(future.result())
            return constraint.error
        return error if isinstance(error, ServiceError) else Internal(f"no grammar: {type(error).__name__}")
