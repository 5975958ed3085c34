"""A small byte-level BPE tokenizer with the markers of the V4.1 chat format (api 5.1)."""

from typing import Final

from epdserve.model.demo.corpus import lines
from epdserve.model.demo.preset import VOCAB_SIZE
from epdserve.model.errors import DemoModelError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS: Final = "<｜begin▁of▁sentence｜>"
EOS: Final = "<｜end▁of▁sentence｜>"
PAD: Final = "<｜▁pad▁｜>"
IMAGE: Final = "<｜deepseek_image｜>"
THINK_END: Final = "</think>"

_RESERVED: Final = (BOS, EOS, PAD)  # ids 0, 1, 2, as published
# The rest stands at the end of the vocabulary, as published. Text such as <think> must survive decoding that
# skips special tokens, so none of these carries the "special" flag.
_MARKERS: Final = (
    "<｜System｜>",
    "<｜fim▁hole｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁end｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    THINK_END,
    "｜DSML｜",
    "<｜latest_reminder｜>",
    IMAGE,
    "<｜polygon｜>",
    "<｜/polygon｜>",
    "<｜point｜>",
    "<｜/point｜>",
    "<｜box｜>",
    "<｜/box｜>",
    "<｜ref｜>",
    "<｜/ref｜>",
    "<｜image｜>",
)
MARKERS: Final = _RESERVED + _MARKERS

_CORPUS_SEED: Final = 41
_CORPUS_LINES: Final = 6000
_DIGITS: Final = r"\p{N}{1,2}"
# Line ends stay with the punctuation before them, so that a line of markup costs few tokens.
_PIECES: Final = r" ?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer() -> Tokenizer:
    """Train on the generated corpus; the same tokenizer every time.

    Raises:
        DemoModelError: If the corpus has too few words for the vocabulary of the preset.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_DIGITS), "isolated"),
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(_MARKERS),
        special_tokens=[_added(marker, special=True) for marker in _RESERVED],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines(_CORPUS_SEED, _CORPUS_LINES), trainer)
    tokenizer.add_tokens([_added(marker, special=False) for marker in _MARKERS])
    if (size := tokenizer.get_vocab_size()) != VOCAB_SIZE:
        raise DemoModelError(f"the corpus gives {size} tokens, the preset wants {VOCAB_SIZE}")
    return tokenizer


def tokenizer_settings(max_length: int) -> dict[str, object]:
    """The ``tokenizer_config.json`` that other tools read beside ``tokenizer.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }


def _added(marker: str, *, special: bool) -> AddedToken:
    return AddedToken(
        marker, single_word=False, lstrip=False, rstrip=False, normalized=False, special=special
    )
