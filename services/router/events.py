"""What an answer is made of, in no protocol's words: parsers make these, shapes write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from epdserve.services.router.vocabulary import Vocabulary
from epdserve.services.sampling import TokenLogprob
from epdserve.services.types import FinishReason


class Kind(StrEnum):
    """Which field of a message a delta belongs to."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"
    ARGUMENTS = "arguments"


@dataclass(slots=True)
class Delta:
    """A piece of the answer.

    Attributes:
        text: New text of the field; the function's name for CALL.
        index: Which tool call, for CALL and ARGUMENTS.
        call_id: For CALL.
        logprobs: OpenAI's entries of the tokens that this text completes; None if not asked for.
    """

    kind: Kind
    text: str
    index: int = 0
    call_id: str = ""
    logprobs: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """How one choice ended.

    Attributes:
        reason: ``stop``, ``length`` or ``tool_calls``.
        stop_sequence: The stop string that ended it.
    """

    reason: str
    stop_sequence: str | None = None


@dataclass(slots=True)
class Call:
    """A tool call as collected."""

    call_id: str
    name: str
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Message:
    """One whole choice, collected from deltas: the same text as the stream by construction."""

    reasoning: str = ""
    content: str = ""
    calls: dict[int, Call] = field(default_factory=dict)
    content_logprobs: list[dict[str, Any]] = field(default_factory=list)
    reasoning_logprobs: list[dict[str, Any]] = field(default_factory=list)
    ending: Ending = Ending("stop")

    def add(self, deltas: Iterable[Delta]) -> None:
        """Take deltas in order."""
        for delta in deltas:
            if delta.kind is Kind.REASONING:
                self.reasoning += delta.text
                self.reasoning_logprobs += delta.logprobs or ()
            elif delta.kind is Kind.CONTENT:
                self.content += delta.text
                self.content_logprobs += delta.logprobs or ()
            elif delta.kind is Kind.CALL:
                self.calls[delta.index] = Call(delta.call_id, delta.text)
            else:
                self.calls[delta.index].arguments.append(delta.text)


class Parser(Protocol):
    """Sampled ids of one choice become deltas. Not thread-safe.

    Attributes:
        completion_tokens: Sampled ids taken, EOS and markers included; ids after a stop string are not.
        reasoning_tokens: Of these, reasoning; None if the request does not think.
        invalid_calls: Calls whose arguments were no JSON object.
        answered: Whether there was any content or call.
        ending: None while the answer runs; then nothing pushed would change it, so decoding may end.
    """

    completion_tokens: int
    reasoning_tokens: int | None
    answered: bool
    ending: Ending | None

    @property
    def invalid_calls(self) -> int:
        """See above."""

    def push(self, ids: Iterable[int], logprobs: Sequence[TokenLogprob] = ()) -> list[Delta]:
        """Deltas that these ids complete, adjacent ones of one field joined; one log-probability an id, or none."""

    def finish(self, reason: FinishReason) -> list[Delta]:
        """Deltas withheld so far; sets ``ending`` if a stop string has not set it already."""


def cut_by_token(deltas: list[Delta], ids: Sequence[int], vocabulary: Vocabulary) -> list[Delta]:
    """One delta a token out of what all of ``ids`` gave together, which is cheaper than to push them one by one.

    Tokens that share a character share a delta; and where the text is not just that of the ids, because there was a
    marker or something was held back, the deltas stay as they are.
    """
    if len(deltas) != 1 or deltas[0].kind not in (Kind.REASONING, Kind.CONTENT):
        return deltas
    texts = vocabulary.texts_of(ids)
    pieces = [text for text in texts if text is not None]
    if len(pieces) < len(texts):
        pieces = _characters(map(vocabulary.bytes_of, ids))
    if "".join(pieces) != deltas[0].text:
        return deltas
    kind = deltas[0].kind
    return [Delta(kind, piece) for piece in pieces if piece]


def _characters(parts: Iterable[bytes]) -> list[str]:
    """Each part as text, joined with those that share a character with it; nothing at all if the end is incomplete."""
    pieces: list[str] = []
    some = b""
    for part in parts:
        some += part
        try:
            pieces.append(some.decode())
        except UnicodeDecodeError:
            continue
        some = b""
    return [] if some else pieces


def join(delta: Delta, deltas: list[Delta]) -> None:
    """Append a delta, or lengthen the last one if both are of one field."""
    last = deltas[-1] if deltas else None
    if last is None or last.kind is not delta.kind or last.index != delta.index or delta.kind is Kind.CALL:
        deltas.append(delta)
        return
    last.text += delta.text
    if delta.logprobs:
        last.logprobs = [*(last.logprobs or ()), *delta.logprobs]
