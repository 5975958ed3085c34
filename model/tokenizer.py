"""Text <-> token ids, without torch.

Two ways in: ``encode`` treats all text as text, so nothing a user types becomes a marker;
``encode_with_markers`` also matches the added vocabulary and is for text that we wrote. Chat rendering is the router's.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from epdserve.model.compressed_tokens import TOKENIZER_FILE
from epdserve.model.errors import TokenizerError
from tokenizers import Tokenizer as _Tokenizer


class Tokenizer:
    """A byte-level BPE tokenizer. Immutable and thread-safe."""

    def __init__(self, definition: str) -> None:
        """Take the content of a ``tokenizer.json``.

        Raises:
            TokenizerError: If it is no tokenizer.
        """
        try:
            document = json.loads(definition)
            self._with_markers = _Tokenizer.from_str(definition)
            self._plain = _Tokenizer.from_str(json.dumps({**document, "added_tokens": []}))
            self._added: dict[int, str] = {
                token["id"]: token["content"] for token in document["added_tokens"]
            }
        except Exception as error:  # noqa: BLE001 - edge: the library raises bare Exception for a bad file
            raise TokenizerError(f"no usable {TOKENIZER_FILE}: {error}") from None

    @classmethod
    def from_directory(cls, directory: str | Path) -> "Tokenizer":
        """Read ``tokenizer.json`` of a model directory.

        Raises:
            TokenizerError: If the file is absent or no tokenizer.
        """
        path = Path(directory) / TOKENIZER_FILE
        try:
            definition = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{path}: {error}") from None
        return cls(definition)

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids, markers included."""
        return self._with_markers.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: markers in it stay ordinary characters, no BOS is added.

        Raises:
            TokenizerError: If the text holds unpaired surrogates.
        """
        return _encode(self._plain, text)

    def encode_with_markers(self, text: str) -> list[int]:
        """Ids of text in which the spelling of an added token means that token. Never for users' text.

        Raises:
            TokenizerError: If the text holds unpaired surrogates.
        """
        return _encode(self._with_markers, text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, markers spelled out; incomplete UTF-8 becomes U+FFFD.

        Raises:
            TokenizerError: If an id is outside the vocabulary.
        """
        for token in ids:
            self._check(token)
        return self._with_markers.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """The bytes one id stands for; those of consecutive ids join to the UTF-8 text.

        Raises:
            TokenizerError: If the id is outside the vocabulary.
        """
        self._check(token)
        if (marker := self._added.get(token)) is not None:
            return marker.encode()
        raw = self._with_markers.id_to_token(token)
        if raw is None:
            raise TokenizerError(f"token id {token} has no entry")
        try:
            return bytes(self._byte_of[character] for character in raw)
        except KeyError:  # not written in the byte alphabet: the entry is its own spelling, as in the decoder
            return raw.encode()

    def marker_id(self, marker: str) -> int:
        """The id of an added token.

        Raises:
            TokenizerError: If there is no such added token.
        """
        for token, content in self._added.items():
            if content == marker:
                return token
        raise TokenizerError(f"no added token {marker!r}")

    def _check(self, token: int) -> None:
        if not 0 <= token < self.vocab_size:
            raise TokenizerError(f"token id {token} is outside 0..{self.vocab_size - 1}")

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        return {character: byte for byte, character in enumerate(byte_alphabet())}


def byte_alphabet() -> list[str]:
    """The printable character by which byte-level BPE writes each byte 0..255.

    Bytes that print in Latin-1 stand for themselves; the others take the code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(256, 512))
    return [chr(byte if byte in printable else next(shifted)) for byte in range(256)]


def _encode(tokenizer: _Tokenizer, text: str) -> list[int]:
    try:
        return tokenizer.encode(text, add_special_tokens=False).ids
    except (TypeError, UnicodeEncodeError):
        raise TokenizerError("text is not valid Unicode: it holds unpaired surrogates") from None
