"""Between two looks at a transfer: no pause while bytes move, longer and longer ones while they do not."""

from __future__ import annotations

import time

import pytest
from epdserve.kvstore.transfer.pacing import MOVING_S, Pauses


def burn(seconds: float) -> None:
    """Use the processor for so long."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@pytest.fixture
def pauses() -> Pauses:
    return Pauses(0.001, 0.004)


def look(pauses: Pauses, *, moves: bool = False, news: bool = False) -> float:
    pauses.begin()
    if moves:
        burn(3 * MOVING_S)
    return pauses.next_s(news=news)


def test_idle_looks_wait_longer_and_longer(pauses: Pauses) -> None:
    assert [look(pauses) for _ in range(4)] == [0.001, 0.002, 0.004, 0.004]


def test_a_look_that_moved_bytes_is_followed_by_another_at_once(pauses: Pauses) -> None:
    for _ in range(3):
        look(pauses)
    assert [look(pauses, moves=True) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert look(pauses) == 0.001


def test_a_look_at_many_reads_may_take_longer(pauses: Pauses) -> None:
    pauses.begin()
    burn(3 * MOVING_S)
    assert pauses.next_s(reads=20) == 0.001


def test_news_shortens_the_pause(pauses: Pauses) -> None:
    for _ in range(3):
        look(pauses)
    assert look(pauses, news=True) == 0.001
    assert look(pauses) == 0.002
