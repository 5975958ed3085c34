"""A byte vocabulary for small models, and what a compiled grammar makes of texts."""

import functools
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import llguidance
import numpy as np
from epdserve.services.grammar.compiler import GrammarCompiler
from epdserve.services.grammar.limits import GrammarLimits
from epdserve.services.grammar.vocabulary import load_vocabulary
from epdserve.services.sampling import Grammar
from support.real_tokenizer import real_tokenizer_json

MARKER = "\N{FULLWIDTH VERTICAL LINE}DSML\N{FULLWIDTH VERTICAL LINE}"
MARKER_ID, THINK_END_ID, EOS_ID, REAL_VOCAB = 128825, 128822, 1, 129280


def byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def byte_tokenizer_json(*, first_byte: int = 16, added: Sequence[str] = ("<s>", "</s>", "</think>")) -> str:
    """A tokenizer whose token ``first_byte + b`` is the byte ``b``; ``added`` are ids 0, 1, ..."""
    vocabulary = {text: n for n, text in enumerate(added)}
    vocabulary |= {f"<unused{n}>": n for n in range(len(added), first_byte)}
    vocabulary |= {character: first_byte + byte for byte, character in enumerate(byte_characters())}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [
                {
                    "id": n,
                    "content": text,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": n < 2,
                }
                for n, text in enumerate(added)
            ],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": False,
            },
            "post_processor": None,
            "decoder": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            },
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        }
    )


FIRST_BYTE = 16  # token of the byte 0 in the small vocabulary


@functools.cache
def byte_vocabulary() -> llguidance.LLTokenizer:
    """The small vocabulary over the tiny model's 512 columns, loaded once a test process."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokenizer.json"
        path.write_text(byte_tokenizer_json(first_byte=FIRST_BYTE), encoding="utf-8")
        return load_vocabulary(path, vocab_size=512, eos_token_id=EOS_ID)


def byte_text(ids: Sequence[int]) -> str:
    """Text of byte tokens; others are left out."""
    return bytes(token - FIRST_BYTE for token in ids if FIRST_BYTE <= token < FIRST_BYTE + 256).decode()


@functools.cache
def real_vocabulary() -> llguidance.LLTokenizer:
    """The published vocabulary, loaded once a test process."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokenizer.json"
        path.write_text(real_tokenizer_json(), encoding="utf-8")
        return load_vocabulary(path, vocab_size=REAL_VOCAB, eos_token_id=EOS_ID)


def compiled(
    vocabulary: llguidance.LLTokenizer, grammar: Grammar, limits: GrammarLimits | None = None
) -> llguidance.LLMatcher:
    """A matcher of a grammar, or the error it is refused with."""
    compiler = GrammarCompiler(lambda: vocabulary, limits)
    try:
        return compiler.compile(grammar).result(20).deep_copy()
    finally:
        compiler.close()


def ids_of(vocabulary: llguidance.LLTokenizer, text: str) -> list[int]:
    """Tokens of a text in which ``MARKER`` stands for the marker's token."""
    ids: list[int] = []
    for number, piece in enumerate(text.split(MARKER)):
        ids += [MARKER_ID] if number else []
        ids += vocabulary.tokenize_str(piece)
    return ids


def takes(vocabulary: llguidance.LLTokenizer, grammar: Grammar, text: str) -> bool:
    """Whether a text as a whole is in the grammar."""
    matcher, ids = compiled(vocabulary, grammar), ids_of(vocabulary, text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def random_text(
    vocabulary: llguidance.LLTokenizer, grammar: Grammar, *, seed: int, most: int = 400
) -> list[int]:
    """Tokens drawn at random from what the grammar allows, to its end; short ones are likelier to end."""
    matcher, draw, ids = compiled(vocabulary, grammar), random.Random(seed), []
    while not matcher.is_stopped() and len(ids) < most:
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(mask, bitorder="little")[: vocabulary.vocab_size].nonzero()[0]
        if EOS_ID in allowed:
            break
        ids.append(int(draw.choice(allowed)))
        assert matcher.consume_token(ids[-1])
    return ids
