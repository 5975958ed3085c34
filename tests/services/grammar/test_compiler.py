"""The cache of compiled grammars."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import llguidance
import pytest
from epdserve.services.errors import Internal, InvalidRequest
from epdserve.services.grammar import formats
from epdserve.services.grammar.compiler import GrammarCompiler
from epdserve.services.grammar.vocabulary import load_vocabulary
from support.grammars import byte_tokenizer_json


@pytest.fixture
def vocabulary(tmp_path: Path) -> llguidance.LLTokenizer:
    path = tmp_path / "tokenizer.json"
    path.write_text(byte_tokenizer_json(), encoding="utf-8")
    return load_vocabulary(path, vocab_size=512, eos_token_id=1)


@pytest.fixture
def make(vocabulary: llguidance.LLTokenizer) -> Iterator[Callable[..., GrammarCompiler]]:
    made = []

    def build(
        load: Callable[[], llguidance.LLTokenizer] = lambda: vocabulary, **options: int
    ) -> GrammarCompiler:
        made.append(GrammarCompiler(load, **options))
        return made[-1]

    yield build
    for compiler in made:
        compiler.close()


def test_a_grammar_is_compiled_once_and_its_copies_go_their_own_ways(
    make: Callable[..., GrammarCompiler],
) -> None:
    compiler = make()
    first, second = (compiler.compile(formats.choice(["ab", "cd"])) for _ in range(2))
    assert first is second
    one, other = first.result(5).deep_copy(), second.result(5).deep_copy()
    assert one.consume_token(16 + ord("a"))
    assert other.consume_token(16 + ord("c"))
    assert (compiler.counts.compiled, compiler.counts.hits) == (1, 1)


def test_the_vocabulary_is_loaded_once_and_only_when_needed(
    make: Callable[..., GrammarCompiler], vocabulary: llguidance.LLTokenizer
) -> None:
    loads = []

    def load() -> llguidance.LLTokenizer:
        loads.append(threading.current_thread().name)
        return vocabulary

    compiler = make(load)
    assert not loads
    for text in ("a", "b"):
        compiler.compile(formats.choice([text])).result(5)
    assert len(loads) == 1
    assert loads[0].startswith("grammar-compile")


def test_only_so_many_are_kept(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make(keep=2)
    for text in ("a", "b", "a", "c", "a", "b"):
        compiler.compile(formats.choice([text])).result(5)
    assert len(compiler) == 2
    assert (compiler.counts.compiled, compiler.counts.evicted, compiler.counts.hits) == (4, 2, 2)


def test_a_failure_is_told_and_not_kept(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make()
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            compiler.compile(formats.regex("(a")).result(5)
    with pytest.raises(InvalidRequest, match="cannot be used"):
        compiler.compile(formats.lark("start: a\na: a")).result(5)
    assert compiler.counts.refused == 3
    assert compiler.counts.hits == 0


def test_a_model_without_tokenizer_says_so(make: Callable[..., GrammarCompiler], tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    for name in ("none.json", "broken.json"):
        compiler = make(lambda name=name: load_vocabulary(tmp_path / name, vocab_size=9, eos_token_id=1))
        with pytest.raises(Internal, match="tokenizer"):
            compiler.compile(formats.json_object()).result(5)


def test_markers_are_special_whatever_the_file_says(vocabulary: llguidance.LLTokenizer) -> None:
    assert all(vocabulary.is_special_token(token) for token in (0, 1, 2))
    assert not vocabulary.is_special_token(16 + ord("a"))
