"""The vocabulary that masks are made of: llguidance's own view of ``tokenizer.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llguidance
import orjson


def load_vocabulary(path: Path, *, vocab_size: int, eos_token_id: int) -> llguidance.LLTokenizer:
    """Read a tokenizer; 0.8 s and some 100 MB for the published one.

    Every added token counts as special, whatever the file says: constrained text is made of plain tokens, and a marker
    comes only where a grammar names its id. The published file marks ``<think>`` and the DSML marker as ordinary.

    Args:
        vocab_size: Columns of the logits; ids beyond the tokenizer's are never allowed.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no tokenizer.
    """
    try:
        entries: dict[str, Any] = orjson.loads(path.read_bytes())
        for token in entries.get("added_tokens", ()):
            token["special"] = True
        return llguidance.LLTokenizer(
            orjson.dumps(entries).decode(), n_vocab=vocab_size, eos_token=eos_token_id
        )
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no tokenizer: {error}") from None
