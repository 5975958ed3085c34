"""Training sequences, drawn anew for every step from (seed, stage, step): a run can be taken up anywhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import torch
from epdserve.model.demo.training import drills, facts, talk, thought, tooling
from epdserve.model.demo.training.facts import LABEL
from epdserve.model.demo.training.opening import Openings
from epdserve.model.demo.training.talk import Exchange
from epdserve.model.demo.training.vocabulary import Strip, Vocabulary
from torch import Tensor

_TURN_ROOM = 24  # tokens below which no further turn is tried
_THINKING_ROOM = 128  # sequences from this length on may think
_MOST_TURNS = 80
_DOCUMENT_ROOM = 48  # tokens below which no further document is begun
_LEAST_ROOM = {
    "json": 128,
    "search": 128,
    "tools": 400,
    "brief": 192,
    "ponder": 220,
}  # below, an opening leaves no room for answers
_STAND_IN = "\x00"  # where a call's text has the DSML marker


class Sequences:
    """Draws sequences from a mixture of kinds."""

    def __init__(
        self, vocabulary: Vocabulary, openings: Openings, draw: random.Random, mixture: Mapping[str, float]
    ) -> None:
        self.vocabulary, self.openings, self.draw = vocabulary, openings, draw
        self.kinds, self.shares = list(mixture), list(mixture.values())
        self.makers: dict[str, Callable[[int], Strip]] = {
            "stream": lambda length: facts.stream(self.draw, self.vocabulary, length),
            "distant": lambda length: facts.stream(self.draw, self.vocabulary, length, distant=True),
            "direct": lambda length: self._about(length, 8, idle=False, in_one_word=True),
            "copy": lambda length: self._talk(self._copying, length),
            "recall": lambda length: self._about(length, length // 14, idle=False),
            "search": lambda length: self._about(length, length // 24, idle=True),
            "talk": lambda length: self._talk(self._anything, length),
            "thinking": lambda length: self._talk(self._anything, length, thought.draw_effort(self.draw)),
            "words": lambda length: self._talk(lambda _: talk.words(self.draw), length),
            "passages": self._passages,
            "calls": lambda length: drills.calls(self.draw, self.vocabulary, length),
            "forms": lambda length: drills.forms(self.draw, self.vocabulary, length),
            "chains": lambda length: drills.chains(self.draw, self.vocabulary, length),
            "ponder": lambda length: self._about(
                length, 8, idle=False, effort=thought.draw_effort(self.draw)
            ),
            "json": self._forms,
            "tools": self._tools,
            "brief": lambda length: self._tools(length, brief=True),
        }

    def batch(self, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Ids and labels, each (count, length)."""
        strips = [self.strip(length) for _ in range(count)]
        ids = torch.tensor([strip.ids for strip in strips])
        return ids, torch.tensor([strip.labels for strip in strips])

    def strip(self, length: int) -> Strip:
        """Documents one after another until another would not fit; silent end markers after them."""
        strip = self._document(length)
        while length - len(strip) >= _DOCUMENT_ROOM:
            strip.join(self._document(length - len(strip)))
        strip.add([self.vocabulary.eos] * max(0, length - len(strip)))
        return Strip(strip.ids[:length], strip.labels[:length])

    def _document(self, room: int) -> Strip:
        """One of a kind that fits, or of any kind if none does."""
        fits = [_LEAST_ROOM.get(kind, 0) <= room for kind in self.kinds]
        shares = [share * (fit or not any(fits)) for share, fit in zip(self.shares, fits, strict=True)]
        return self.makers[self.draw.choices(self.kinds, shares)[0]](room)

    def _copying(self, room: int) -> Exchange:
        return facts.copy(self.draw, room)

    def _anything(self, room: int) -> Exchange:
        kind = self.draw.random()
        if kind < 0.3:
            return facts.copy(self.draw, room)
        return (talk.greeting, talk.words, talk.passage)[int((kind - 0.3) / 0.7 * 3)](self.draw)

    def _talk(self, ask: Callable[[int], Exchange], length: int, effort: int | None = None) -> Strip:
        """Turns of any kind; with an effort, which may be drawn, the last one thinks."""
        effort = effort or self._effort(length)
        strip = self._opened(effort)
        if effort is not None:
            before = self.draw.choice((0, 0, 1))
            for _ in range(before):
                self._join(strip, self._turn(ask(length - len(strip) - 100), None), length)
            self._join(strip, self._turn(ask(length - len(strip) - 90), effort), length)
            return strip
        for _ in range(_MOST_TURNS):
            if (room := length - len(strip)) < _TURN_ROOM:
                break
            self._join(strip, self._turn(ask(room), None), length)
        return strip

    def _about(
        self,
        length: int,
        most_facts: int,
        *,
        idle: bool,
        in_one_word: bool | None = None,
        effort: int | None = None,
    ) -> Strip:
        """Facts, between sentences about other things if ``idle``, and questions about them.

        Args:
            effort: With which the first question is thought about; None = drawn, mostly not at all.
        """
        known = facts.Facts(self.draw, self.draw.randint(1, max(2, most_facts)))
        sentences = known.sentences()
        if idle:
            budget = length * self.draw.uniform(0.45, 0.75)
            spent = sum(len(self.vocabulary.tokenizer.encode(sentence)) for sentence in sentences)
            while spent < budget:
                between = talk.idle_sentence(self.draw)
                sentences.insert(self.draw.randint(0, len(sentences)), between)
                spent += len(self.vocabulary.encode(" " + between))
        if effort is None and self.draw.random() < 0.5:
            effort = self._effort(length)
        text = " ".join(sentences)
        in_system = self.draw.random() < 0.2
        strip = self._opened(effort, text if in_system else None)
        text = "" if in_system else text + "\n\n"
        for number in range(_MOST_TURNS):
            if (room := length - len(strip)) < _TURN_ROOM:
                break
            copies = number and self.draw.random() < 0.15
            exchange = (
                facts.copy(self.draw, room) if copies else known.ask(self.draw, in_one_word=in_one_word)
            )
            thinks = effort is not None and number == 0
            self._join(
                strip, self._turn(exchange, effort if thinks else None, text if not number else ""), length
            )
        return strip

    def _passages(self, length: int) -> Strip:
        """A text and several questions about it."""
        told = talk.Passage(self.draw)
        strip = self._opened(None)
        for number in range(_MOST_TURNS):
            if length - len(strip) < _TURN_ROOM:
                break
            before = "" if number else told.text + "\n\n"
            self._join(strip, self._turn(told.ask(self.draw), None, before), length)
        return strip

    def _forms(self, length: int) -> Strip:
        """Objects of one schema."""
        effort = self._effort(length) if self.draw.random() < 0.5 else None
        fields = self.draw.sample(talk.FIELDS, self.draw.randint(1, 4))
        strip = self.openings.strip(effort=effort, schema=talk.schema_of(fields))
        for number in range(_MOST_TURNS):
            if length - len(strip) < _TURN_ROOM:
                break
            thinks = effort if number == 0 else None
            self._join(strip, self._turn(talk.form(self.draw, fields), thinks), length)
        return strip

    def _tools(self, length: int, *, brief: bool = False) -> Strip:
        """Requests that need a tool, its result, the answer; reasoning stays where tools are declared."""
        effort = self._effort(length)
        tools = tooling.draw_tools(self.draw)
        strip = self.openings.strip(effort=effort, tools=[tool.declared for tool in tools], brief=brief)
        for _ in range(_MOST_TURNS):
            if length - len(strip) < _TURN_ROOM:
                break
            if self.draw.random() < 0.1:
                self._join(strip, self._turn(talk.greeting(self.draw), effort), length)
                continue
            request = tooling.draw_request(self.draw, self.draw.choice(tools))
            call = self.vocabulary.marked("\n\n" + tooling.call_text(request, _STAND_IN), _STAND_IN)
            first, last = tooling.thoughts(request)
            asked = self.vocabulary.turn(
                request.question, call, LABEL["tool"], thought=self._thought(effort, first, last)
            )
            if not self._join(strip, asked, length):
                continue  # a result without its request would teach to make things up
            told = self.vocabulary.turn(
                f"<tool_result>{request.result}</tool_result>",
                self.vocabulary.encode(request.answer),
                LABEL["result"],
                thought=self._thought(effort, "I have the result.", "I tell the result."),
            )
            self._join(strip, told, length)
        return strip

    def _turn(self, exchange: Exchange, effort: int | None, before: str = "") -> Strip:
        answer = self.vocabulary.encode(exchange.answer)
        thinks = self._thought(effort, exchange.first, exchange.last)
        return self.vocabulary.turn(before + exchange.question, answer, LABEL[exchange.task], thought=thinks)

    def _thought(self, effort: int | None, first: str, last: str) -> Strip | None:
        if effort is None:
            return None
        return self.vocabulary.thought(thought.reasoning(effort, first, last), LABEL["think"])

    def _effort(self, length: int) -> int | None:
        if length < _THINKING_ROOM:
            return None
        return thought.draw_effort(self.draw) if self.draw.random() < 0.4 else None

    def _opened(self, effort: int | None, text: str | None = None) -> Strip:
        if text is None and effort is not None and self.draw.random() < 0.25:
            text = self.draw.choice(talk.SYSTEMS)
        return self.openings.strip(effort=effort, system=text)

    @staticmethod
    def _join(strip: Strip, turn: Strip, length: int) -> bool:
        """Append a turn that fits, or the first one whatever its length (it is cut then); whether it was."""
        fits = len(strip) + len(turn) <= length or not any(label >= 0 for label in strip.labels)
        if fits:
            strip.join(turn)
        return fits
