import itertools
import random

from epdserve.loadtest.workloads import agent_turns, chat, prose


def test_same_seed_sends_the_same_bytes() -> None:
    assert chat("m", words=50, max_tokens=4, seed=7) == chat("m", words=50, max_tokens=4, seed=7)
    assert chat("m", words=50, max_tokens=4, seed=7) != chat("m", words=50, max_tokens=4, seed=8)


def test_prose_has_the_asked_number_of_words() -> None:
    assert len(prose(100, random.Random(1)).split()) == 100


def test_each_turn_of_an_agent_starts_with_the_one_before() -> None:
    turns = agent_turns("m", turns=4, words=20, max_tokens=4, seed=1)
    assert len(turns) == 4
    for before, after in itertools.pairwise(turns):
        assert after["messages"][: len(before["messages"])] == before["messages"]
        assert len(after["messages"]) == len(before["messages"]) + 2
