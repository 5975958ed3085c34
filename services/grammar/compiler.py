"""Compiles grammars in a thread of its own and keeps the latest ones.

A request gets a copy of the compiled grammar: a copy takes some 30 us, whatever the grammar cost. The vocabulary is
loaded when the first grammar comes, as most workers never see one.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import llguidance
from epdserve.services.errors import Internal, Overloaded
from epdserve.services.grammar.checking import digest_of
from epdserve.services.grammar.limits import GrammarLimits
from epdserve.services.grammar.source import refusal, source_of
from epdserve.services.sampling import Grammar

log = logging.getLogger(__name__)

_WAITING: Final = 256


@dataclass(slots=True)
class CompilerCounts:
    """What the cache did so far; read by metrics."""

    hits: int = 0
    compiled: int = 0
    refused: int = 0
    evicted: int = 0


class GrammarCompiler:
    """A cache of compiled grammars. Owned by one thread but for ``counts``; futures end in the compiler's thread.

    Args:
        vocabulary: Loads it; called once, in the compiler's thread.
        keep: Compiled grammars kept, the ones used longest ago go first.
    """

    def __init__(
        self,
        vocabulary: Callable[[], llguidance.LLTokenizer],
        limits: GrammarLimits | None = None,
        *,
        keep: int = 128,
    ) -> None:
        self.limits = limits or GrammarLimits()
        self._load, self._keep = vocabulary, keep
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-compile")
        self._known: OrderedDict[bytes, Future[llguidance.LLMatcher]] = OrderedDict()
        self.counts = CompilerCounts()

    def __len__(self) -> int:
        return len(self._known)

    def compile(self, grammar: Grammar) -> Future[llguidance.LLMatcher]:
        """The compiled grammar, to be copied before use; what is wrong with it comes as the future's exception.

        Raises:
            Overloaded: Too many wait to be compiled.
        """
        digest = digest_of(grammar)
        known = self._known.get(digest)
        if known is not None and not (known.done() and known.exception() is not None):
            self.counts.hits += 1
            self._known.move_to_end(digest)
            return known
        if sum(not future.done() for future in self._known.values()) >= _WAITING:
            raise Overloaded(f"{_WAITING} grammars wait to be compiled", retry_after_s=1.0)
        future = self._known[digest] = self._thread.submit(self._compile, grammar)
        self._known.move_to_end(digest)
        while len(self._known) > max(self._keep, 1):
            self._known.popitem(last=False)
            self.counts.evicted += 1
        return future

    def close(self) -> None:
        """Take no more; what is being compiled ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        """Raises ``InvalidRequest`` for a grammar that will not do, ``Internal`` if there is no vocabulary."""
        if self._vocabulary is None:
            try:
                self._vocabulary = self._load()
            except (OSError, ValueError) as error:
                log.warning("no vocabulary for grammars", extra={"error": str(error)})
                raise Internal("this worker has no tokenizer to constrain output with") from None
        matcher = llguidance.LLMatcher(
            self._vocabulary, source_of(grammar, self.limits), log_level=0, limits=self.limits.of_parser()
        )
        matcher.compute_bitmask()  # the first mask is the dearest, and tells what no text can satisfy
        if matcher.is_error() or matcher.is_stopped():
            self.counts.refused += 1
            raise refusal(matcher.get_error() or "no text satisfies it")
        self.counts.compiled += 1
        return matcher
