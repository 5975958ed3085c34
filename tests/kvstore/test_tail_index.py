from __future__ import annotations

import numpy as np
from epdserve.kvstore.tail_index import TailIndex
from epdserve.kvstore.tails import TailId, TailPlace, rest_digest
from hypothesis import given
from hypothesis import strategies as st

P, Q = b"p" * 16, b"q" * 16


def place(parent: bytes, *after: int) -> TailPlace:
    return TailPlace(parent, len(after), rest_digest(np.array(after, np.int64)))


def fitting(index: TailIndex, parent: bytes, *after: int) -> list[bytes]:
    return [identity[:1] for identity, _ in index.fitting(parent, np.array(after, np.int32))]


def test_the_longest_tail_that_the_prompt_continues_comes_first() -> None:
    index = TailIndex()
    for letter, where in (
        (b"a", place(P)),
        (b"b", place(P, 1, 2)),
        (b"c", place(P, 1)),
        (b"d", place(P, 1, 3)),
        (b"e", place(Q, 1)),
    ):
        index.add(TailId(letter * 16), where)
    assert fitting(index, P, 1, 2, 9) == [b"b", b"c", b"a"]
    assert fitting(index, P, 1, 3) == [b"d", b"c", b"a"]
    assert fitting(index, P, 7) == [b"a"]
    assert fitting(index, P) == [b"a"]
    assert fitting(index, b"x" * 16, 1) == []
    index.discard(TailId(b"b" * 16), place(P, 1, 2))
    index.discard(TailId(b"b" * 16), place(P, 1, 2))
    assert fitting(index, P, 1, 2, 9) == [b"c", b"a"]
    assert len(index) == 4


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=8), st.lists(st.integers(0, 2), max_size=6))
def test_what_fits_is_what_a_search_finds(tails: list[list[int]], prompt: list[int]) -> None:
    index = TailIndex()
    names = {tuple(after): TailId(bytes([number]) * 16) for number, after in enumerate(tails)}
    for after, identity in names.items():
        index.add(identity, place(P, *after))
    wanted = sorted((a for a in names if tuple(prompt[: len(a)]) == a), key=lambda a: -len(a))
    assert fitting(index, P, *prompt) == [names[a][:1] for a in wanted]
