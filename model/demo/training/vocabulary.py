"""Token ids of texts and markers, and conversations put together from them as the chat format lays them out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from epdserve.model.demo.tokenizer import BOS, EOS, THINK_END, train_tokenizer
from epdserve.model.tokenizer import Tokenizer

SILENT = -1  # label of a token that is read and not learnt
_ENCODED = 65536  # texts whose ids are kept


@dataclass(slots=True)
class Strip:
    """A training sequence: token ids, and for each the number of the task it is an answer of, or ``SILENT``."""

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, ids: Sequence[int], label: int = SILENT) -> None:
        """Append ids under one label."""
        self.ids.extend(ids)
        self.labels.extend([label] * len(ids))

    def join(self, other: Strip) -> None:
        """Append another strip."""
        self.ids.extend(other.ids)
        self.labels.extend(other.labels)


class Vocabulary:
    """The demo tokenizer and the turns of a conversation in it."""

    def __init__(self) -> None:
        self.definition = train_tokenizer().to_str(pretty=True)
        self.tokenizer = Tokenizer(self.definition)
        self.encode = lru_cache(_ENCODED)(self._encode)
        mark = self.tokenizer.marker_id
        self.bos, self.eos = mark(BOS), mark(EOS)
        self.system, self.user, self.assistant = (
            mark(f"<\uff5c{role}\uff5c>") for role in ("System", "User", "Assistant")
        )
        self.think, self.think_end = mark("<think>"), mark(THINK_END)
        self.dsml = mark("\uff5cDSML\uff5c")

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text))

    def texts(self) -> list[str]:
        """What each token stands for, by id."""
        return [self.tokenizer.decode([token]) for token in range(self.tokenizer.vocab_size)]

    def turn(
        self, question: str, answer: Sequence[int], label: int, *, thought: Strip | None = None
    ) -> Strip:
        """A user's message and the assistant's answer, up to and with the end marker.

        Args:
            thought: Reasoning before the answer; None = the assistant does not think.
        """
        strip = Strip()
        strip.add([self.user, *self.encode(question), self.assistant])
        if thought is None:
            strip.add([self.think_end])
        else:
            strip.add([self.think])
            strip.join(thought)
        strip.add([*answer, self.eos], label)
        return strip

    def thought(self, text: str, label: int) -> Strip:
        """Reasoning and the marker that ends it."""
        strip = Strip()
        strip.add([*self.encode(text), self.think_end], label)
        return strip

    def marked(self, text: str, stand_in: str) -> list[int]:
        """Ids of a text in which ``stand_in`` stands for the DSML marker."""
        ids: list[int] = []
        for number, piece in enumerate(text.split(stand_in)):
            ids += [self.dsml] * bool(number) + list(self.encode(piece))
        return ids

    def with_markers(self, text: str) -> list[int]:
        """Ids of a text in which \\x01 stands for <User>, \\x02 for the header of a plain answer, \\x03 for its end."""
        markers = {"\x01": [self.user], "\x02": [self.assistant, self.think_end], "\x03": [self.eos]}
        ids: list[int] = []
        for piece in re.split("([\x01-\x03])", text):
            ids += markers.get(piece) or self.encode(piece)
        return ids
