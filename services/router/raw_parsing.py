"""Sampled ids of a raw completion become text: no reasoning, no calls, markers spelled out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from epdserve.services.router.events import Delta, Ending, Kind, join
from epdserve.services.router.parsing import ParserOptions
from epdserve.services.router.stops import StopFilter, StopMatcher
from epdserve.services.router.tokenizer import RouterTokenizer
from epdserve.services.router.vocabulary import TextDecoder
from epdserve.services.sampling import TokenLogprob
from epdserve.services.types import FinishReason


class RawParser:
    """Text of one choice. Implements ``Parser``.

    Args:
        show_special: Tokens that the tokenizer calls special are spelled out, too; EOS never is.
        discard: Nothing of the output is wanted; it ends with its first tokens and counts none.
    """

    reasoning_tokens: int | None = None

    def __init__(
        self,
        tokenizer: RouterTokenizer,
        options: ParserOptions,
        *,
        show_special: bool = False,
        discard: bool = False,
    ) -> None:
        self._vocabulary = tokenizer.vocabulary
        self._silent = frozenset(options.stop_token_ids) | {tokenizer.eos_id}
        if not show_special:
            self._silent |= tokenizer.vocabulary.special_ids
        self._decoder = TextDecoder()
        self._discard = discard
        self._filter = StopFilter(StopMatcher(options.stops, include=options.include_stop))
        self.completion_tokens = 0
        self.answered = False
        self.ending: Ending | None = None

    @property
    def invalid_calls(self) -> int:
        """Raw text has no calls."""
        return 0

    def push(self, ids: Iterable[int], logprobs: Sequence[TokenLogprob] = ()) -> list[Delta]:
        """Text that these ids complete; see ``Parser``."""
        deltas: list[Delta] = []
        if self._discard:
            self.ending = Ending("length")
        for token, told in zip_longest(ids, logprobs):
            if self.ending is not None:
                break
            self.completion_tokens += 1
            if token in self._silent:
                continue
            text = self._decoder.push(self._vocabulary.bytes_of(token))
            entries = None if told is None else [self._vocabulary.logprob_entry(token, told)]
            if text or entries:
                self.answered = True
                found = self._filter.push(Delta(Kind.CONTENT, text, logprobs=entries), deltas)
                self.ending = None if found is None else Ending("stop", found)
        return deltas

    def finish(self, reason: FinishReason) -> list[Delta]:
        """What was held back; see ``Parser``."""
        deltas: list[Delta] = []
        self._filter.flush(deltas)
        if self.ending is None:
            self.ending = Ending(reason.value)
        joined: list[Delta] = []
        for delta in deltas:
            join(delta, joined)
        return joined
