import hashlib
import os
import subprocess
import sys

import deepseek_recipe as recipe
import pytest
from epdserve.model.demo.preset import VOCAB_SIZE
from epdserve.model.demo.tokenizer import BOS, EOS, MARKERS, PAD, train_tokenizer
from epdserve.model.tokenizer import Tokenizer

DEFINITION = train_tokenizer().to_str(pretty=True)
TOKENIZER = Tokenizer(DEFINITION)
KINDS = [kind for kind in vars(recipe.SpecialToken).values() if isinstance(kind, recipe.SpecialToken)]


def render(*messages: recipe.Message, thinking: bool = True) -> list[int]:
    encoding = recipe.DeepseekV41Encoding().with_tokenizer(recipe.Tokenizer.from_str(DEFINITION))
    return encoding.encode(recipe.Conversation(list(messages), thinking_mode=thinking))


def marker(kind: recipe.SpecialToken) -> int:
    return TOKENIZER.marker_id(kind.default_str())


def test_vocabulary_has_the_size_of_the_preset() -> None:
    assert TOKENIZER.vocab_size == VOCAB_SIZE
    assert [TOKENIZER.marker_id(name) for name in (BOS, EOS, PAD)] == [0, 1, 2]


def test_every_marker_of_the_chat_format_is_a_token() -> None:
    assert len(KINDS) == 18
    assert {kind.default_str() for kind in KINDS} <= set(MARKERS)


def test_training_gives_the_same_bytes_in_any_process_and_thread_count() -> None:
    program = (
        "import hashlib; from epdserve.model.demo.tokenizer import train_tokenizer; "
        "print(hashlib.sha256(train_tokenizer().to_str(pretty=True).encode()).hexdigest())"
    )
    environment = {**os.environ, "RAYON_NUM_THREADS": "3", "PYTHONHASHSEED": "7"}
    run = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment,
    )
    assert run.stdout.strip() == hashlib.sha256(DEFINITION.encode()).hexdigest()


def test_official_encoding_renders_a_conversation() -> None:
    ids = render(recipe.SystemMessage("Be brief."), recipe.UserMessage("Hello, river!"))
    special = recipe.SpecialToken
    shape = [token for token in ids if token in {marker(kind) for kind in KINDS}]
    assert shape == [
        marker(k)
        for k in (special.Bos, special.System, special.User, special.Assistant, special.ThinkingStart)
    ]
    assert "Reasoning Effort: 75" in TOKENIZER.decode(ids)
    assert TOKENIZER.decode(ids).endswith(
        "Hello, river!" + "".join(k.default_str() for k in (special.Assistant, special.ThinkingStart))
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.default_str())
def test_markers_typed_by_a_user_stay_text(kind: recipe.SpecialToken) -> None:
    plain = render(recipe.UserMessage("ab"), thinking=False)
    typed = render(recipe.UserMessage(f"a{kind.default_str()}b"), thinking=False)
    assert typed.count(marker(kind)) == plain.count(marker(kind))
    assert f"a{kind.default_str()}b" in TOKENIZER.decode(typed)


def test_plain_encoding_equals_that_of_the_official_library() -> None:
    text = "The code of Vikin is 41 07.\n\n<think> def f(x): return 3 \u4e2d"
    special = recipe.SpecialToken
    ids = render(recipe.UserMessage(text), thinking=False)
    start = ids.index(marker(special.User)) + 1
    assert ids[start : ids.index(marker(special.Assistant))] == TOKENIZER.encode(text)


def test_words_of_the_corpus_are_short() -> None:
    assert len(TOKENIZER.encode("The quick brown fish and the old king")) <= 10
