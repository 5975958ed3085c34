"""EBNF as llama.cpp, xgrammar and SGLang write it (``root ::= ...``), rewritten as the library's Lark.

The library has a converter of its own, which takes time square in the rules and folds characters into greedy tokens,
so that ``[a-z]* "b"`` matches nothing. This one is linear and keeps characters apart; names become ``r0``, ``r1`` ...

    rule    NAME ::= alternatives; ends where the next NAME ::= begins
    item    "text", [class], [^class], ., NAME, ( alternatives ), each with *, +, ?, {n}, {n,} or {n,m}
    escape  \\n \\r \\t \\" \\\\ \\[ \\] \\- \\^ \\/, \\xHH, \\uHHHH, \\UHHHHHHHH
    comment from # to the end of its line
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from epdserve.services.errors import InvalidRequest

MOST_BYTES: Final = 16 * 1024
_DEEPEST: Final = 64
_MOST_TIMES: Final = 10_000
_ROOT: Final = "root"

_TOKEN: Final = re.compile(
    r"""(?P<blank>\s+|\#[^\n]*)
      | (?P<head>[\w-]+\s*::=)
      | (?P<name>[\w-]+)
      | (?P<text>"(?:[^"\\\n]|\\.)*")
      | (?P<chars>\[(?:[^\]\\\n]|\\.)*\])
      | (?P<times>[*+?]|\{\s*\d{1,6}\s*(?:,\s*(?:\d{1,6})?\s*)?\})
      | (?P<sign>[|().])""",
    re.VERBOSE,
)
_CHARACTER: Final = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<plain>[nrt\"\\\[\]^/-]))"
    r"|(?P<itself>[^\\])",
    re.DOTALL,
)
_NAMED: Final = {"n": "\n", "r": "\r", "t": "\t"}


def is_ebnf(text: str) -> bool:
    """Whether a grammar is written this way; Lark's rules have a single colon."""
    return "::=" in text


def lark_of(text: str, *, param: str) -> str:
    """The same grammar as Lark.

    Raises:
        InvalidRequest: Longer than 16 KiB, or not this notation; the message says where.
    """
    if len(text.encode()) > MOST_BYTES:
        raise InvalidRequest(f"{param}: at most {MOST_BYTES} bytes of EBNF are taken", param=param)
    reader = _Reader(param)
    for kind, token, at in _tokens(text, param):
        reader.take(kind, token, at)
    return reader.lark()


def _tokens(text: str, param: str) -> Iterator[tuple[str, str, int]]:
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None or found.lastgroup is None:
            raise _wrong(param, at, "neither a name, a text, a class nor a sign")
        if found.lastgroup != "blank":
            yield found.lastgroup, found.group(), at
        at = found.end()


@dataclass(slots=True)
class _Reader:
    """Writes Lark as tokens come. ``_open`` counts groups, ``_item`` tells whether something may be repeated."""

    param: str
    _names: dict[str, str] = field(default_factory=dict)
    _defined: set[str] = field(default_factory=set)
    _out: list[str] = field(default_factory=list)
    _open: int = 0
    _item: bool = False

    def take(self, kind: str, token: str, at: int) -> None:
        """The next token."""
        if kind == "head":
            self._begin(token[:-3].rstrip(), at)
            return
        if not self._defined:
            raise _wrong(self.param, at, "a rule begins with NAME ::=")
        if kind == "times":
            self._repeat(token, at)
        elif kind == "sign" and token != ".":
            self._sign(token, at)
        else:
            self._item = True
            self._out.append(self._written(kind, token, at))

    def lark(self) -> str:
        """The whole.

        Raises:
            InvalidRequest: A group is open, or a name has no rule.
        """
        self._end(None)
        for name in (_ROOT, *self._names):
            if name not in self._defined:
                raise InvalidRequest(f"{self.param}: no rule {name[:64]!r}", param=self.param)
        return " ".join(self._out).lstrip() + "\n"

    def _begin(self, name: str, at: int) -> None:
        self._end(at)
        if name in self._defined:
            raise _wrong(self.param, at, "a second rule of this name")
        self._defined.add(name)
        self._out.append(f"\n{self._rule(name)}:")

    def _end(self, at: int | None) -> None:
        if self._open:
            raise _wrong(self.param, at, "a group is not closed")
        if self._defined and not self._item:
            self._out.append('""')
        self._item = False

    def _sign(self, sign: str, at: int) -> None:
        if sign == "(":
            self._open += 1
            if self._open > _DEEPEST:
                raise _wrong(self.param, at, f"groups may be nested {_DEEPEST} deep")
        elif not self._item:
            self._out.append('""')  # an empty alternative
        if sign == ")":
            self._open -= 1
            if self._open < 0:
                raise _wrong(self.param, at, "no group is open")
        self._item = sign == ")"
        self._out.append(sign)

    def _repeat(self, token: str, at: int) -> None:
        if not self._item or self._out[-1][-1:] in "*+?}" or self._out[-1] in ("|", "("):
            raise _wrong(self.param, at, "nothing to repeat")
        numbers = [int(number) for number in re.findall(r"\d+", token)]
        if any(number > _MOST_TIMES for number in numbers) or numbers != sorted(numbers):
            raise _wrong(self.param, at, f"counts rise and are at most {_MOST_TIMES}")
        self._out[-1] += re.sub(r"\s", "", token)

    def _written(self, kind: str, token: str, at: int) -> str:
        if kind == "name":
            return self._rule(token)
        if kind == "text":
            return json.dumps("".join(map(chr, _characters(token[1:-1], self.param, at))))
        return r"/(?s:.)/" if token == "." else _class(token[1:-1], self.param, at)

    def _rule(self, name: str) -> str:
        return self._names.setdefault(name, "start" if name == _ROOT else f"r{len(self._names)}")


def _class(inside: str, param: str, at: int) -> str:
    """A class of characters, each written by its number: nothing in it means anything to the library."""
    denied = inside.startswith("^")
    marks = list(_CHARACTER.finditer(inside, 1 if denied else 0))
    codes = _characters(inside[1:] if denied else inside, param, at)
    if not codes:
        raise _wrong(param, at, "an empty class")
    pieces: list[str] = []
    n = 0
    while n < len(codes):
        last = codes[n]
        if n + 2 < len(codes) and marks[n + 1].group() == "-":
            last = codes[n + 2]
            if last < codes[n]:
                raise _wrong(param, at, "a range that falls")
        pieces.append(rf"\x{{{codes[n]:x}}}" + (rf"-\x{{{last:x}}}" if last > codes[n] else ""))
        n += 3 if n + 2 < len(codes) and marks[n + 1].group() == "-" else 1
    return f"/[{'^' if denied else ''}{''.join(pieces)}]/"


def _characters(text: str, param: str, at: int) -> list[int]:
    codes: list[int] = []
    where = 0
    while where < len(text):
        found = _CHARACTER.match(text, where)
        if found is None:
            raise _wrong(param, at + where, "an escape that is not known")
        where = found.end()
        number = found["x"] or found["u"] or found["U"]
        plain = found["plain"]
        code = int(number, 16) if number else ord(_NAMED.get(plain, plain) if plain else found["itself"])
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise _wrong(param, at, "no character has this number")
        codes.append(code)
    return codes


def _wrong(param: str, at: int | None, words: str) -> InvalidRequest:
    where = "the end" if at is None else f"character {at}"
    return InvalidRequest(f"{param}: at {where}: {words}", param=param)
