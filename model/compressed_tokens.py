"""Token id -> compressed id, the alphabet of the Engram hashes (modules 1.2).

Tokens that differ only in case, accents, width or surrounding white space share a class. The number of
classes enters the hash multipliers: one too many would silently move every row, so counts are checked.
"""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from epdserve.model.config import ModelConfig
from epdserve.model.errors import TokenizerError
from tokenizers import Regex, Tokenizer, normalizers

TOKENIZER_FILE: Final = "tokenizer.json"
MAP_FILE: Final = "compressed_token_map.json"

_REPLACEMENT: Final = "\ufffd"  # what an incomplete UTF-8 piece decodes to
_SHIELD: Final = "\ue000"  # keeps a token that is one space from being stripped to nothing
_BATCH: Final = 8192


def load_or_derive_token_map(model_dir: str | Path, config: ModelConfig) -> npt.NDArray[np.int64]:
    """The map of a model: its ``compressed_token_map.json`` if there is one, else from ``tokenizer.json``.

    Returns:
        (vocab_size,) int64 with values in 0 .. engram_compressed_vocab_size - 1.

    Raises:
        TokenizerError: Neither file is usable, or the numbers of ids or classes differ from the config.
    """
    directory = Path(model_dir)
    if (directory / MAP_FILE).exists():
        token_map = _read_map(directory / MAP_FILE)
    else:
        token_map = derive_token_map(_open_tokenizer(directory / TOKENIZER_FILE))
    _check(token_map, config, directory)
    return token_map


def derive_token_map(tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """Number the classes in the order in which ids 0, 1, 2, ... first show them.

    Raises:
        TokenizerError: If the ids of the tokenizer have a gap.
    """
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    normalize = _normalizer()
    classes: dict[str, int] = {}
    token_map = np.empty(size, dtype=np.int64)
    for start in range(0, size, _BATCH):
        ids = range(start, min(start + _BATCH, size))
        texts = tokenizer.decode_batch([[token] for token in ids], skip_special_tokens=False)
        for token, text in zip(ids, texts, strict=True):
            key = _key(tokenizer, normalize, token, text)
            token_map[token] = classes.setdefault(key, len(classes))
    return token_map


def _key(tokenizer: Tokenizer, normalize: normalizers.Normalizer, token: int, text: str) -> str:
    if _REPLACEMENT not in text:
        return normalize.normalize_str(text) or text
    raw = tokenizer.id_to_token(token)
    if raw is None:
        raise TokenizerError(f"the tokenizer has no token {token}")
    return raw


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SHIELD),
            normalizers.Strip(),
            normalizers.Replace(_SHIELD, " "),
        ]
    )


def _open_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # noqa: BLE001 - edge: the library raises bare Exception for a bad file
        raise TokenizerError(f"{path}: {error}") from None


def _read_map(path: Path) -> npt.NDArray[np.int64]:
    try:
        document: Any = json.loads(path.read_bytes())
        ids = document["lookup"] if isinstance(document, dict) else document
        token_map = np.array(ids)
    except (OSError, ValueError, KeyError) as error:
        raise TokenizerError(f"{path}: {error!r}") from None
    if token_map.ndim != 1 or token_map.dtype.kind != "i":
        raise TokenizerError(f"{path}: must hold a list of integers")
    return token_map.astype(np.int64)


def _check(token_map: npt.NDArray[np.int64], config: ModelConfig, directory: Path) -> None:
    text = config.text
    if len(token_map) != text.vocab_size:
        raise TokenizerError(f"{directory}: {len(token_map)} token ids, config.json has {text.vocab_size}")
    classes = np.unique(token_map)
    expected = text.engram_compressed_vocab_size
    if len(classes) != expected or classes[0] != 0 or classes[-1] != expected - 1:
        raise TokenizerError(
            f"{directory}: {len(classes)} compressed ids in {classes[0]}..{classes[-1]}, "
            f"config.json has engram_compressed_vocab_size {expected}"
        )
