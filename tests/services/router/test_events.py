"""One event a token out of what several tokens gave together."""

import orjson
import pytest
from epdserve.services.router.events import Delta, Kind, cut_by_token
from epdserve.services.router.vocabulary import Vocabulary

# In the letters of byte-level vocabularies: U+0120 is a space, the last three are bytes E2 82, AC and FF
PIECES = {"Hel": 1, "lo": 2, "\u0120": 3, "\u00e2\u0124": 4, "\u00ac": 5, "": 6, "\u00ff": 7}
VOCABULARY = Vocabulary(orjson.dumps({"model": {"vocab": PIECES}}).decode())


def cut(text: str, *ids: int, kind: Kind = Kind.CONTENT) -> list[str]:
    return [delta.text for delta in cut_by_token([Delta(kind, text)], ids, VOCABULARY)]


@pytest.mark.parametrize("kind", [Kind.CONTENT, Kind.REASONING])
def test_each_token_gets_its_piece(kind: Kind) -> None:
    assert cut("Hello ", 1, 2, 3, kind=kind) == ["Hel", "lo", " "]


def test_tokens_of_one_character_share_a_piece_and_empty_ones_have_none() -> None:
    assert cut("Hel\N{EURO SIGN}lo", 1, 4, 6, 5, 2) == ["Hel", "\N{EURO SIGN}", "lo"]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hel", (1, 4)),  # half a character is held back
        ("\N{EURO SIGN}lo", (5, 2)),  # it began in an earlier batch
        ("lo", (1, 2)),  # something was swallowed
        ("Hello", (1, 2, 7)),  # never text
    ],
)
def test_what_is_not_just_the_text_of_the_ids_stays_whole(text: str, ids: tuple[int, ...]) -> None:
    assert cut(text, *ids) == [text]


def test_calls_and_several_deltas_stay_as_they_are() -> None:
    call = [Delta(Kind.ARGUMENTS, "Hello")]
    both = [Delta(Kind.REASONING, "Hel"), Delta(Kind.CONTENT, "lo")]
    assert cut_by_token(call, (1, 2), VOCABULARY) is call
    assert cut_by_token(both, (1, 2), VOCABULARY) is both
    assert cut_by_token([], (6,), VOCABULARY) == []
