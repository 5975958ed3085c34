"""The model's tokenizer as the router sees it: the recipe's native one, and the ids that mean something.

Everything that knows a marker's spelling takes it from the recipe; nothing here spells one out.
"""

from __future__ import annotations

import os
from pathlib import Path

import deepseek_recipe as recipe
import orjson
from epdserve.services.router.vocabulary import Vocabulary

# Encoding with the library's own thread pool makes a short prompt wait for the long ones that fill it (measured: 1.2 s
# behind six prompts of 450 KB, 0.1 s without). Long ones run in threads of ours.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class RouterTokenizer:
    """Tokenizer of one model directory, without torch. Thread-safe: the native object is immutable.

    Attributes:
        native: What the recipe's stream processor takes.
        encoding: Renders and encodes conversations.
        eos_id: The only id that ends an answer.
        assistant_id: Begins the header of an answer.
        think_start_id: Begins the reasoning.
        think_end_id: Ends the reasoning.
        dsml_id: Starts tool call markup, also inside the reasoning.
        longest_token_bytes: No token stands for more text than this.
        vocabulary: What ids stand for.
    """

    def __init__(self, tokenizer_json: str) -> None:
        """Take the contents of ``tokenizer.json``.

        Raises:
            ValueError: It is no tokenizer, or lacks a marker of the V4.1 chat layout.
        """
        self.native = native = recipe.Tokenizer.from_str(tokenizer_json)
        self.vocabulary = Vocabulary(tokenizer_json)
        self.longest_token_bytes = _longest_token_bytes(tokenizer_json)
        # Takes a copy of the tokenizer, 0.2 s for the real one: once a process, not once a renderer
        self.encoding = recipe.DeepseekV41Encoding().with_tokenizer(native)
        self.eos_id = _marker_id(native, recipe.SpecialToken.Eos)
        self.assistant_id = _marker_id(native, recipe.SpecialToken.Assistant)
        self.think_start_id = _marker_id(native, recipe.SpecialToken.ThinkingStart)
        self.think_end_id = _marker_id(native, recipe.SpecialToken.ThinkingEnd)
        self.dsml_id = _marker_id(native, recipe.SpecialToken.Dsml)
        for marker in (
            recipe.SpecialToken.Bos,
            recipe.SpecialToken.System,
            recipe.SpecialToken.User,
        ):
            _marker_id(native, marker)

    @classmethod
    def from_directory(cls, model_dir: Path) -> RouterTokenizer:
        """Load ``tokenizer.json``.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It lacks a marker of the V4.1 chat layout.
        """
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer.json in {model_dir}")
        return cls(path.read_text(encoding="utf-8"))

    def plain_ids(self, text: str) -> list[int]:
        """Ids of text in which nothing is a marker.

        Only a conversation is encoded that way by the recipe: what stands between the markers of one user turn.
        """
        message = recipe.UserMessage(text)
        return self.encoding.encode(recipe.Conversation([message], thinking_mode=False))[2:-2]

    def marker_id(self, spelling: str) -> int:
        """Id of an added token.

        Raises:
            ValueError: There is none of that spelling.
        """
        ids = self.native.encode(spelling)
        if len(ids) != 1 or not self.vocabulary.is_marker(ids[0]):
            raise ValueError(f"the tokenizer has no token {spelling}")
        return ids[0]

    def number_ids(self, number: int) -> list[int]:
        """Ids of a decimal number that stands alone (digit groups never merge with their neighbours)."""
        return self.native.encode(str(number))


def _marker_id(native: recipe.Tokenizer, marker: recipe.SpecialToken) -> int:
    ids = native.encode(marker.default_str())
    if len(ids) != 1:
        raise ValueError(f"the tokenizer has no token {marker.default_str()}: it encodes to {len(ids)} ids")
    return ids[0]


def _longest_token_bytes(tokenizer_json: str) -> int:
    """Bytes of the longest entry; an entry of a byte-level vocabulary has a character a byte, an added token more."""
    entries = orjson.loads(tokenizer_json)
    added = (len(token["content"].encode()) for token in entries.get("added_tokens", ()))
    return max(max(map(len, entries["model"]["vocab"])), max(added, default=0))
