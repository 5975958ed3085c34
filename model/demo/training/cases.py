"""Questions of the evaluation: one prompt and one right answer each, drawn from seeds that training never uses."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from epdserve.model.demo.training import facts, talk, thought, tooling, unpractised
from epdserve.model.demo.training.opening import Openings
from epdserve.model.demo.training.talk import Exchange
from epdserve.model.demo.training.vocabulary import Strip, Vocabulary

BLOCK: Final = 32  # tokens of a block: hits without a tail end on its boundaries
_STAND_IN: Final = "\x00"
_AROUND: Final = 24  # tokens of a prompt before and after its text, about


@dataclass(frozen=True, slots=True)
class Case:
    """Token ids of a prompt, generation header included, and of the one right answer, end marker included.

    Attributes:
        cut: Tokens to find as a prefix so that replay begins at the value that is asked for; 0 if it begins nowhere
            in particular.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    cut: int = 0


class Cases:
    """Draws cases by name.

    Names: copy, recall, direct, greet, passage, words, json, tool, result (what is said after a tool's result);
    ``recall-N`` and ``direct-N`` with N tokens of facts and other sentences, answered in a sentence and in one word;
    ``copy-N``, ``words-N`` and ``passage-N`` after a turn about such a text; ``think-N`` and ``tool-N`` with effort N.
    ``cut-N`` is a ``recall-N`` whose value is the first token of a block, so that a hit of one block more replays from
    it on; ``snip-N`` is the same of ``direct-N``. Never practised: add, count, sort, longer (copies of more words than
    any in training).
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary, self._openings = vocabulary, Openings(vocabulary)

    def draw(self, name: str, number: int) -> Case:
        """Case ``number`` of a name."""
        draw = random.Random(f"held out {name} {number}")
        kind, _, amount = name.partition("-")
        size = int(amount) if amount else 0
        makers: dict[str, Callable[[], Case]] = {
            "copy": lambda: self._after(draw, size, facts.copy(draw, 400)),
            "recall": lambda: self._recall(draw, size or 128),
            "direct": lambda: self._recall(draw, size or 128, in_one_word=True),
            "cut": lambda: self._cut(draw, size, in_one_word=False),
            "snip": lambda: self._cut(draw, size, in_one_word=True),
            "greet": lambda: self._plain(talk.greeting(draw)),
            "passage": lambda: self._after(draw, size, talk.passage(draw)),
            "words": lambda: self._after(draw, size, talk.words(draw)),
            "json": lambda: self._json(draw),
            "tool": lambda: self._tool(draw, size or None),
            "result": lambda: self._result(draw),
            "add": lambda: self._plain(unpractised.addition(draw)),
            "count": lambda: self._plain(unpractised.counting(draw)),
            "sort": lambda: self._plain(unpractised.sorting(draw)),
            "longer": lambda: self._plain(unpractised.long_copy(draw)),
            "think": lambda: self._thinking(draw, size),
        }
        return makers[kind]()

    def text(self, ids: Sequence[int]) -> str:
        """What ids of an answer say."""
        return self._vocabulary.tokenizer.decode(list(ids))

    def _case(self, opening: Strip, turn: Strip) -> Case:
        """Split a turn at its first learnt token."""
        start = next(i for i, label in enumerate(turn.labels) if label >= 0)
        return Case((*opening.ids, *turn.ids[:start]), tuple(turn.ids[start:]))

    def _plain(self, exchange: Exchange, effort: int | None = None, before: str = "") -> Case:
        thinks = None
        if effort is not None:
            thinks = self._vocabulary.thought(thought.reasoning(effort, exchange.first, exchange.last), 0)
        answer = self._vocabulary.encode(exchange.answer)
        turn = self._vocabulary.turn(before + exchange.question, answer, 0, thought=thinks)
        return self._case(self._openings.strip(effort=effort), turn)

    def _after(self, draw: random.Random, length: int, asked: Exchange) -> Case:
        """A question alone; with a length, after a turn about such a text and far enough on for a hit to end in it."""
        case = self._plain(asked)
        if not length:
            return case
        before = self._recall(draw, length)
        opening = len(self._openings.strip())
        return Case((*before.prompt, *before.answer, *case.prompt[opening:]), case.answer)

    def _recall(self, draw: random.Random, length: int, *, in_one_word: bool = False) -> Case:
        known, text = self._known(draw, length)
        return self._plain(known.ask(draw, in_one_word=in_one_word), before=text)

    def _cut(self, draw: random.Random, length: int, *, in_one_word: bool) -> Case:
        """Texts are drawn until one has a value at the start of a block, some way from both ends."""
        while True:
            known, text = self._known(draw, length)
            for name in known.values:
                case = self._plain(known.about(name, in_one_word=in_one_word), before=text)
                at = _find(case.prompt, self._vocabulary.encode(f" {name} is {known.values[name]}."))
                value = at + len(self._vocabulary.encode(f" {name} is"))
                if value % BLOCK == 0 and 2 * BLOCK <= value < len(case.prompt) - BLOCK - 1:
                    return replace(case, cut=value + BLOCK)

    def _known(self, draw: random.Random, length: int) -> tuple[facts.Facts, str]:
        """Facts, and a text of about ``length`` tokens that tells them among other things."""
        known = facts.Facts(draw, max(3, min(length // 24, 100)))
        sentences = known.sentences()
        spent = sum(self._tokens(sentence) for sentence in sentences)
        while spent < length - _AROUND:
            idle = talk.idle_sentence(draw)
            sentences.insert(draw.randint(0, len(sentences)), idle)
            spent += self._tokens(idle)
        return known, " ".join(sentences) + "\n\n"

    def _tokens(self, sentence: str) -> int:
        return len(self._vocabulary.encode(" " + sentence))

    def _thinking(self, draw: random.Random, effort: int) -> Case:
        known = facts.Facts(draw, 6)
        asked = known.ask(draw, in_one_word=False)
        return self._plain(asked, effort, " ".join(known.sentences()) + "\n\n")

    def _json(self, draw: random.Random) -> Case:
        fields = draw.sample(talk.FIELDS, draw.randint(1, 4))
        exchange = talk.form(draw, fields)
        turn = self._vocabulary.turn(exchange.question, self._vocabulary.encode(exchange.answer), 0)
        return self._case(self._openings.strip(schema=talk.schema_of(fields)), turn)

    def _tool(self, draw: random.Random, effort: int | None) -> Case:
        opening, turn, _ = self._called(draw, effort)
        return self._case(opening, turn)

    def _result(self, draw: random.Random) -> Case:
        opening, turn, request = self._called(draw, None)
        opening.join(turn)
        told = f"<tool_result>{request.result}</tool_result>"
        return self._case(opening, self._vocabulary.turn(told, self._vocabulary.encode(request.answer), 0))

    def _called(self, draw: random.Random, effort: int | None) -> tuple[Strip, Strip, tooling.Request]:
        """Declared tools, a request and the call that answers it."""
        tools = tooling.draw_tools(draw)
        request = tooling.draw_request(draw, draw.choice(tools))
        call = self._vocabulary.marked("\n\n" + tooling.call_text(request, _STAND_IN), _STAND_IN)
        thinks = None
        if effort is not None:
            thinks = self._vocabulary.thought(thought.reasoning(effort, *tooling.thoughts(request)), 0)
        turn = self._vocabulary.turn(request.question, call, 0, thought=thinks)
        return self._openings.strip(effort=effort, tools=[tool.declared for tool in tools]), turn, request


def _find(ids: Sequence[int], part: Sequence[int]) -> int:
    """Where ``part`` begins in ``ids``; -1 if nowhere."""
    places = (at for at in range(len(ids)) if tuple(ids[at : at + len(part)]) == tuple(part))
    return next(places, -1)
