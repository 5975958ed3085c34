"""Sampled ids become reasoning, content and tool calls: the recipe's stream processor, one instance a choice.

Markers are recognised by id, so the same characters typed by anyone are text. EOS never reaches the processor.
Nothing depends on how ids were grouped on the way here; a property of the tests says so. Stop strings are ours, not the
recipe's: protocols want to know which one it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

import deepseek_recipe as recipe
import orjson
from epdserve.services.router.events import Delta, Ending, Kind, join
from epdserve.services.router.recipe_faults import CallTolerance, TagRepair
from epdserve.services.router.rendering import RenderedChat
from epdserve.services.router.stops import StopFilter, StopMatcher
from epdserve.services.router.tokenizer import RouterTokenizer
from epdserve.services.router.vocabulary import told_to_recipe
from epdserve.services.sampling import TokenLogprob
from epdserve.services.types import FinishReason

_REASONS: Final = {
    FinishReason.STOP: recipe.InferenceFinishReason.Stop,
    FinishReason.LENGTH: recipe.InferenceFinishReason.Length,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserOptions:
    """What a request says about the parsing of its answer.

    Attributes:
        stops: Stop strings, matched in content; in the reasoning too if ``stop_in_reasoning``.
        include_stop: The matched stop string belongs to the answer.
        stop_token_ids: Ids that end the answer and are no text.
        parallel_calls: False keeps the first call only.
        unwrap_arguments: Arguments inside a property ``arguments`` or ``input`` that no schema has are taken out.
    """

    stops: Sequence[str] = ()
    include_stop: bool = False
    stop_in_reasoning: bool = False
    stop_token_ids: Sequence[int] = ()
    parallel_calls: bool = True
    unwrap_arguments: bool = True


class OutputParser:
    """Parses the output of one choice of a chat and counts its tokens. Implements ``Parser``.

    The recipe's own count of reasoning tokens misses ids when the reasoning quotes a marker, so ours is used.
    """

    def __init__(
        self, chat: RenderedChat, tokenizer: RouterTokenizer, options: ParserOptions | None = None
    ) -> None:
        options = options if options is not None else ParserOptions()
        generator = recipe.ChatCompletionRequest.chunk_generator(chat.conversion, "", "")
        self._processor = recipe.StreamProcessor(generator, chat.parsing, tokenizer.native)
        self._processor.push(recipe.InferenceChunk.ready())
        stage = chat.parsing.thinking_initial_stage
        self._in_reasoning = stage is not None and stage.starts_in_reasoning()
        self._eos_id = tokenizer.eos_id
        self._stop_ids = frozenset(options.stop_token_ids)
        self._think_end_id = tokenizer.think_end_id
        calls = chat.parsing.parse_tool_calls
        self._dsml_id = tokenizer.dsml_id if calls else -1
        self._repair = TagRepair(tokenizer.vocabulary, tokenizer.dsml_id, chat.schemas) if calls else None
        self._tolerance = CallTolerance(
            chat.schemas, unwrap=options.unwrap_arguments, parallel=options.parallel_calls
        )
        self._filters: dict[Kind, StopFilter] = {}
        if options.stops:
            kinds = (Kind.CONTENT, Kind.REASONING) if options.stop_in_reasoning else (Kind.CONTENT,)
            for kind in kinds:
                self._filters[kind] = StopFilter(StopMatcher(options.stops, include=options.include_stop))
        self._vocabulary = tokenizer.vocabulary
        self._mid_character = False
        self._in_bulk = not self._filters and options.parallel_calls
        self._counted_apart = self._stop_ids | {self._eos_id, self._think_end_id, self._dsml_id}
        self.completion_tokens = 0
        self.reasoning_tokens: int | None = None if stage is None else 0
        self.ending: Ending | None = None
        self.answered = False

    @property
    def invalid_calls(self) -> int:
        """Calls whose arguments were no JSON object."""
        return self._tolerance.invalid

    def push(self, ids: Iterable[int], logprobs: Sequence[TokenLogprob] = ()) -> list[Delta]:
        """Deltas that these ids complete; see ``Parser``."""
        deltas: list[Delta] = []
        if self._in_bulk and not logprobs:
            self._push_all(ids, deltas)
            return deltas
        for token, told in zip_longest(ids, logprobs):
            if self.ending is not None:
                break
            self._count(token)
            if token == self._eos_id or token in self._stop_ids:
                continue
            if self._repair is None:
                self._feed([token], told, deltas)
            elif passed := self._repair.push(token):
                self._feed(passed, told, deltas)
        return deltas

    def finish(self, reason: FinishReason) -> list[Delta]:
        """Deltas withheld so far; see ``Parser``."""
        deltas: list[Delta] = []
        if self._repair is not None and (held := self._repair.flush()):
            self._feed(held, None, deltas)
        if self.ending is None:
            for chunk in self._processor.push(recipe.InferenceChunk.finish(_REASONS[reason])):
                self._take(chunk.to_json(), deltas)
        for filter_ in self._filters.values():
            filter_.flush(deltas)
        if self.ending is None:
            raise AssertionError("the stream processor gave no finish reason")
        if self.ending.stop_sequence is None:
            self._tolerance.finish(deltas, complete=self.ending.reason == "tool_calls")
        return deltas

    def _push_all(self, ids: Iterable[int], deltas: list[Delta]) -> None:
        """All ids at once: an eighth of the price, where nothing can end the answer between two of them.

        But not those whose bytes are part of a character: the recipe would hold all of it back, and drop it with an
        incomplete end.
        """
        if self.ending is not None:
            return
        ids = list(ids)
        if self._is_plain(ids):
            self.completion_tokens += len(ids)
            if self._in_reasoning:
                self.reasoning_tokens = (self.reasoning_tokens or 0) + len(ids)
            self._feed_some(ids, deltas)
            return
        passed: list[int] = []
        for token in ids:
            self._count(token)
            if token == self._eos_id or token in self._stop_ids:
                continue
            if self._repair is None:
                passed.append(token)
            else:
                passed += self._repair.push(token)
        whole: list[int] = []
        for token in passed:
            if not self._vocabulary.is_whole(token):
                self._feed_some(whole, deltas)
                whole = []
                self._feed([token], None, deltas)
                self._mid_character = True
            elif self._mid_character:
                # It ends what was broken, one way or the other
                self._feed([token], None, deltas)
                self._mid_character = False
            else:
                whole.append(token)
        self._feed_some(whole, deltas)

    def _is_plain(self, ids: list[int]) -> bool:
        """Whether these are whole characters of the field that is open, as most ids are."""
        return (
            not self._mid_character
            and self._counted_apart.isdisjoint(ids)
            and (self._repair is None or self._repair.idle)
            and self._vocabulary.are_whole(ids)
        )

    def _feed_some(self, ids: list[int], deltas: list[Delta]) -> None:
        if ids and self.ending is None:
            self._feed(ids, None, deltas)

    def _feed(self, ids: list[int], told: TokenLogprob | None, deltas: list[Delta]) -> None:
        # Ids that were held back for a tag are in no field, so what is told about them is not asked for
        given = told_to_recipe([told]) if told is not None and len(ids) == 1 else None
        if told is not None and given is None:
            given = [(0.0, [])] * len(ids)
        for chunk in self._processor.push(recipe.InferenceChunk.tokens(ids, given)):
            self._take(chunk.to_json(), deltas)
            if self.ending is not None:
                return

    def _count(self, token: int) -> None:
        self.completion_tokens += 1
        if not self._in_reasoning:
            return
        if token in (self._think_end_id, self._eos_id):
            self._in_reasoning = False
        elif token == self._dsml_id:
            # The "<" before the marker is markup, not reasoning
            self._in_reasoning = False
            self.reasoning_tokens = max(0, (self.reasoning_tokens or 0) - 1)
        else:
            self.reasoning_tokens = (self.reasoning_tokens or 0) + 1

    def _take(self, chunk_json: str, deltas: list[Delta]) -> None:
        choice = orjson.loads(chunk_json)["choices"][0]
        delta = choice["delta"]
        told = choice["logprobs"] or {}
        if reasoning := delta.get("reasoning_content"):
            self._add(Delta(Kind.REASONING, reasoning, logprobs=told.get("reasoning_content")), deltas)
        if content := delta.get("content"):
            self.answered = True
            self._add(Delta(Kind.CONTENT, content, logprobs=told.get("content")), deltas)
        for call in delta.get("tool_calls") or ():
            self.answered = True
            self._add_call(call, deltas)
        if self.ending is None and choice["finish_reason"] is not None:
            self.ending = Ending(choice["finish_reason"])

    def _add(self, delta: Delta, deltas: list[Delta]) -> None:
        if self.ending is not None:
            return
        for kind, other in self._filters.items():
            if kind is not delta.kind:
                other.flush(deltas)  # a field that follows another ends it
        filter_ = self._filters.get(delta.kind)
        if filter_ is None:
            join(delta, deltas)
        elif (found := filter_.push(delta, deltas)) is not None:
            self.ending = Ending("stop", found)

    def _add_call(self, call: dict[str, Any], deltas: list[Delta]) -> None:
        # Content ends where a call begins, and with it what a stop string might have become
        for filter_ in self._filters.values():
            filter_.flush(deltas)
        function = call["function"]
        if "name" in function:
            # Never joined with its arguments: clients expect id and name first, arguments only afterwards
            self._tolerance.push(Delta(Kind.CALL, function["name"], call["index"], call["id"]), deltas)
        if not self._tolerance.ended and (arguments := function.get("arguments")):
            self._tolerance.push(Delta(Kind.ARGUMENTS, arguments, call["index"]), deltas)
        if self._tolerance.ended:
            self.ending = Ending("tool_calls")
