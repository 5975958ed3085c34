"""Dense practice of the second hop: many values that are asked for away from their names, and little between them.

A value of a call or of an object stands some tokens after the name of its field, and that name is not next to it in
the question. Whole conversations with tools have one such value in two hundred tokens; here it is one in twenty.
"""

from __future__ import annotations

import json
import random
from typing import Final

from epdserve.model.demo import corpus
from epdserve.model.demo.training import talk, tooling
from epdserve.model.demo.training.facts import LABEL
from epdserve.model.demo.training.vocabulary import Strip, Vocabulary

_STAND_IN: Final = "\x00"
_MIXED: Final = 0.4  # of the drills in which fields come in another order than in the question
_WHOLE: Final = 0.3  # of the calls that are written from their first token on


def calls(draw: random.Random, vocabulary: Vocabulary, length: int) -> Strip:
    """Requests and calls without declarations; mostly only the last tokens before an argument are written."""
    strip = _begun(vocabulary)
    whole = draw.random() < _WHOLE
    reports = draw.random() < 0.4
    while len(strip) < length:
        request = tooling.draw_request(draw, tooling.draw_tool(draw))
        strip.add([vocabulary.user, *vocabulary.encode(request.question), vocabulary.assistant])
        strip.add([vocabulary.think_end])
        strip.join(_whole_call(vocabulary, request) if whole else _arguments(draw, vocabulary, request))
        if reports:
            told = f"<tool_result>{request.result}</tool_result>"
            strip.join(vocabulary.turn(told, vocabulary.encode(request.answer), LABEL["result"]))
    return _cut(strip, length)


def forms(draw: random.Random, vocabulary: Vocabulary, length: int) -> Strip:
    """Objects without a schema: in the order of the question, or in another one, of which only values are learnt."""
    strip, mixed = _begun(vocabulary), draw.random() < _MIXED
    while len(strip) < length:
        fields = draw.sample(talk.FIELDS, draw.randint(1, 4))
        exchange = talk.form(draw, fields, mixed=mixed)
        if not mixed:
            answer = vocabulary.encode(exchange.answer)
            strip.join(vocabulary.turn(exchange.question, answer, LABEL["json"]))
            continue
        strip.add([vocabulary.user, *vocabulary.encode(exchange.question), vocabulary.assistant])
        strip.add([vocabulary.think_end])
        text, last = exchange.answer, 0
        for field, value in json.loads(text).items():
            start = text.index(json.dumps(value), text.index(json.dumps(field), last) + len(field) + 2)
            lead = start + isinstance(value, str)
            _add_parts(strip, vocabulary, text[last:lead], str(value), "json")
            last = lead + len(str(value))
        strip.add([*vocabulary.encode(text[last:]), vocabulary.eos])
    return _cut(strip, length)


def chains(draw: random.Random, vocabulary: Vocabulary, length: int) -> Strip:
    """Objects of which only names of fields and whether another one follows are learnt.

    Half of them have any words for fields, so that what comes next is looked up and not known by heart.
    """
    strip = _begun(vocabulary)
    while len(strip) < length:
        fields = draw.sample(talk.FIELDS if draw.random() < 0.5 else corpus.NOUNS, draw.randint(1, 5))
        exchange = talk.form(draw, fields)
        strip.add([vocabulary.user, *vocabulary.encode(exchange.question), vocabulary.assistant])
        strip.add([vocabulary.think_end])
        for number, (field, value) in enumerate(json.loads(exchange.answer).items(), 1):
            quote = '"' * isinstance(value, str)
            strip.add(vocabulary.encode('{"' if number == 1 else ' "'))
            strip.add(vocabulary.encode(field), LABEL["field"])
            strip.add(vocabulary.encode(f'": {quote}'))
            strip.add(vocabulary.encode(str(value)))
            strip.add(vocabulary.encode(quote + ("," if number < len(fields) else "}")), LABEL["field"])
        strip.add([vocabulary.eos])
    return _cut(strip, length)


def _arguments(draw: random.Random, vocabulary: Vocabulary, request: tooling.Request) -> Strip:
    strip = Strip()
    fields = list(request.arguments.items())
    if draw.random() < 0.5:
        draw.shuffle(fields)
    for field, value in fields:
        plain = isinstance(value, str)
        lead = draw.choice(("", f"{_STAND_IN} parameter"))
        strip.add(vocabulary.marked(f'{lead} name="{field}" string="{json.dumps(plain)}">', _STAND_IN))
        strip.add(vocabulary.encode(str(value)), LABEL["argument"])
        strip.add(vocabulary.encode("</"))
    strip.add([vocabulary.eos])
    return strip


def _whole_call(vocabulary: Vocabulary, request: tooling.Request) -> Strip:
    strip = Strip()
    text = "\n\n" + tooling.call_text(request, _STAND_IN)
    strip.add([*vocabulary.marked(text, _STAND_IN), vocabulary.eos], LABEL["tool"])
    return strip


def _add_parts(strip: Strip, vocabulary: Vocabulary, before: str, value: str, task: str) -> None:
    """What leads to a value is read, the value is learnt."""
    strip.add(vocabulary.encode(before))
    strip.add(vocabulary.encode(value), LABEL[task])


def _begun(vocabulary: Vocabulary) -> Strip:
    strip = Strip()
    strip.add([vocabulary.bos])
    return strip


def _cut(strip: Strip, length: int) -> Strip:
    return Strip(strip.ids[:length], strip.labels[:length])
