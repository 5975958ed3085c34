"""Checks grammars before anything is spent on their requests: in threads, within a deadline, each text once.

The library keeps to its fuel, so a check that is given up ends soon by itself; until then it holds one of the threads.
A grammar that passes may still fail with the vocabulary, which only decode workers have; they say so before the first
token.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import llguidance
from epdserve.services.errors import InvalidRequest, Overloaded
from epdserve.services.grammar.limits import GrammarLimits
from epdserve.services.grammar.source import PARAM, refusal, source_of
from epdserve.services.sampling import Grammar

_THREADS: Final = 2
_WAITING: Final = 64
_REMEMBERED: Final = 1024


@dataclass(slots=True)
class CheckCounts:
    """What became of the checks so far."""

    known: int = 0
    passed: int = 0
    refused: int = 0
    late: int = 0


class GrammarChecks:
    """Owned by one event loop."""

    def __init__(self, limits: GrammarLimits | None = None) -> None:
        self._limits = limits or GrammarLimits()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar-check")
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        self._running = 0
        self.counts = CheckCounts()

    async def check(self, grammar: Grammar) -> None:
        """Let a grammar pass.

        Raises:
            InvalidRequest: It is wrong, too large, or takes too long to check.
            Overloaded: Too many wait to be checked.
        """
        digest = digest_of(grammar)
        if digest in self._passed:
            self._passed.move_to_end(digest)
            self.counts.known += 1
            return
        if self._running >= _WAITING:
            raise Overloaded(f"{self._running} grammars wait to be checked", retry_after_s=1.0)
        try:
            async with asyncio.timeout(self._limits.check_s):
                await self._run(grammar)
        except TimeoutError:
            self.counts.late += 1
            message = f"the grammar could not be checked within {self._limits.check_s} s"
            raise InvalidRequest(message, param=PARAM) from None
        except InvalidRequest:
            self.counts.refused += 1
            raise
        self.counts.passed += 1
        self._passed[digest] = None
        if len(self._passed) > _REMEMBERED:
            self._passed.popitem(last=False)

    def close(self) -> None:
        """Take no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, grammar: Grammar) -> None:
        future = self._threads.submit(check_grammar, grammar, self._limits)
        self._running += 1
        loop = asyncio.get_running_loop()
        # counted until the thread is free again, however long its caller waited
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._one_less))
        await asyncio.wrap_future(future)

    def _one_less(self) -> None:
        self._running -= 1


def digest_of(grammar: Grammar) -> bytes:
    """Name of a grammar's text in its language; when it begins is no part of it."""
    return blake2b(f"{grammar.kind.value}\0{grammar.text}".encode(), digest_size=16).digest()


def check_grammar(grammar: Grammar, limits: GrammarLimits) -> None:
    """Check in this thread, Python's lock released.

    Raises:
        InvalidRequest: It is wrong or too large.
    """
    source = source_of(grammar, limits)
    reason = llguidance.LLMatcher.validate_grammar(source, None, limits=limits.of_parser())
    if reason and not reason.startswith("WARNING"):
        raise refusal(reason)
