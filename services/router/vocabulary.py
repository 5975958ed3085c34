"""What each token id stands for, in bytes: for raw completions, detokenizing and log-probabilities."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, Final, TypeVar

import orjson
from epdserve.services.errors import InvalidRequest
from epdserve.services.sampling import TokenLogprob

ValueT = TypeVar("ValueT")

# JSON has no infinity; OpenAI's own number for it
_LEAST_LOGPROB: Final = -9999.0


def _byte_letters() -> dict[str, int]:
    """The letters in which byte-level vocabularies write bytes: printable ones as they are, others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


def _text(some: bytes) -> str | None:
    try:
        return some.decode()
    except UnicodeDecodeError:
        return None


class _Filling(dict[int, ValueT]):
    """A dictionary that works out what it does not hold yet: looking up what it holds runs no Python."""

    def __init__(self, compute: Callable[[int], ValueT]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token: int) -> ValueT:
        found = self[token] = self._compute(token)
        return found


_BYTE_OF: Final = _byte_letters()


class Vocabulary:
    """Bytes of every id of a ``tokenizer.json``. Immutable."""

    def __init__(self, tokenizer_json: str) -> None:
        document = orjson.loads(tokenizer_json)
        added = {token["id"]: token for token in document.get("added_tokens", ())}
        vocab: dict[str, int] = document["model"]["vocab"]
        size = 1 + max([*vocab.values(), *added], default=-1)
        self._entries: list[str | None] = [None] * size
        for entry, number in vocab.items():
            self._entries[number] = entry
        self._added: dict[int, bytes] = {number: token["content"].encode() for number, token in added.items()}
        # Bounded by the vocabulary
        self._known = _Filling(self._compute_bytes)
        self._texts = _Filling(lambda token: _text(self._known[token]))
        self._whole: set[int] = set()
        self.bytes_of: Callable[[int], bytes] = self._known.__getitem__
        """The bytes of one id; an added token's spelling; nothing for an id without an entry."""
        self.special_ids = frozenset(number for number, token in added.items() if token.get("special"))

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, token: int) -> bool:
        return 0 <= token < len(self._entries) and (self._entries[token] is not None or token in self._added)

    def texts_of(self, ids: Iterable[int]) -> list[str | None]:
        """The text of each id, None where its bytes are no whole characters."""
        return list(map(self._texts.__getitem__, ids))

    def _compute_bytes(self, token: int) -> bytes:
        if (spelling := self._added.get(token)) is not None:
            return spelling
        entry = self._entries[token] if 0 <= token < len(self._entries) else None
        if entry is None:
            return b""
        try:
            return bytes([_BYTE_OF[letter] for letter in entry])
        except KeyError:  # an entry outside the byte alphabet stands for itself
            return entry.encode()

    def is_whole(self, token: int) -> bool:
        """Whether the bytes of an id are whole characters."""
        whole = self._texts[token] is not None
        if whole:
            self._whole.add(token)
        return whole

    def are_whole(self, ids: Sequence[int]) -> bool:
        """Whether that is so of each of these ids."""
        return self._whole.issuperset(ids) or all(map(self.is_whole, ids))

    def is_marker(self, token: int) -> bool:
        """Whether the id is an added token."""
        return token in self._added

    def marker_places(self, ids: Sequence[int]) -> list[int]:
        """Where among these ids added tokens stand."""
        if self._added.keys().isdisjoint(ids):
            return []
        return [place for place, token in enumerate(ids) if token in self._added]

    @cached_property
    def byte_ids(self) -> dict[int, int]:
        """The id of each single byte, where the vocabulary has one."""
        return {
            _BYTE_OF[entry]: token
            for token, entry in enumerate(self._entries)
            if entry is not None and len(entry) == 1 and entry in _BYTE_OF and token not in self._added
        }

    def text_of(self, ids: Iterable[int]) -> str:
        """Text of the ids, markers spelled out; what is no UTF-8 becomes U+FFFD."""
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", "replace")

    def check(self, ids: Sequence[int], *, param: str) -> None:
        """Refuse ids that stand for nothing.

        Raises:
            InvalidRequest: One of them is outside the vocabulary.
        """
        for token in ids:
            if token not in self:
                raise InvalidRequest(
                    f"token id {token} is outside the vocabulary of {len(self)}", param=param
                )

    def name_of(self, token: int) -> str:
        """A token as log-probabilities call it."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def logprob_entry(self, token: int, told: TokenLogprob) -> dict[str, Any]:
        """OpenAI's object for one drawn token and its alternatives."""
        top = [self._one(other, logprob) for other, logprob in told.top]
        return {**self._one(token, told.logprob), "top_logprobs": top}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self.bytes_of(token)
        text = raw.decode("utf-8", "replace")
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(_LEAST_LOGPROB, logprob)


class TextDecoder:
    """Bytes of tokens become whole characters; what is no UTF-8 is left out, an incomplete end as well."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")

    def push(self, raw: bytes) -> str:
        """Characters that are complete now."""
        return self._decoder.decode(raw)


def told_to_recipe(told: Sequence[TokenLogprob]) -> list[tuple[float, list[tuple[int, float]]]]:
    """Log-probabilities as the recipe's chunks take them."""
    return [(finite(one.logprob), [(token, finite(logprob)) for token, logprob in one.top]) for one in told]
