"""Every workload is what it says, and two runs send the same."""

import random
import zlib
from dataclasses import replace

import pytest
from epdserve.loadtest.traffic.lexicon import Lexicon
from epdserve.loadtest.traffic.pictures import png
from epdserve.loadtest.traffic.recipes import WORKLOADS, Kitchen, Sizes, build
from support.toy_openai import tokens_of

KITCHEN = Kitchen(Lexicon(("a", "of", "to", "the"), overhead=6), Sizes(prompt=40, answer=8), seed=3)


@pytest.mark.parametrize("name", [*WORKLOADS, "mixed"])
def test_same_seed_gives_the_same_sessions(name: str) -> None:
    offsets = [0.5 * number for number in range(20)]
    sessions = build(name, KITCHEN, offsets)
    assert sessions == build(name, KITCHEN, offsets)
    assert sessions != build(name, replace(KITCHEN, seed=4), offsets)
    assert [session.at_s for session in sessions] == offsets


def test_lengths_are_the_asked_ones_or_vary_as_far_as_told() -> None:
    [one] = build("chat", KITCHEN, [0.0])
    assert tokens_of(list(one.turns[0].messages)) == one.turns[0].prompt_tokens == 40
    varied = replace(KITCHEN, sizes=replace(KITCHEN.sizes, vary=0.5))
    lengths = {session.turns[0].prompt_tokens for session in build("chat", varied, [0.0] * 50)}
    assert len(lengths) > 5
    assert all(20 <= length <= 60 for length in lengths if length is not None)


def test_an_agent_takes_all_its_turns_with_tools_and_pauses() -> None:
    kitchen = replace(KITCHEN, sizes=replace(KITCHEN.sizes, turns=50, think_s=0.2))
    [session] = build("agent", kitchen, [0.0])
    assert len(session.turns) == 50
    assert all(turn.fields["tools"] for turn in session.turns)
    assert sum(turn.think_s for turn in session.turns) == pytest.approx(50 * 0.2, rel=0.5)


def test_few_system_prompts_are_shared_by_many() -> None:
    sessions = build("shared", KITCHEN, [0.0] * 60)
    systems = {session.turns[0].messages[0]["content"] for session in sessions}
    assert 2 <= len(systems) <= 4
    assert len({session.turns[0].messages[1]["content"] for session in sessions}) == 60


def test_most_leave_in_a_cancel_storm() -> None:
    leavers = [s.turns[0].leave_after_s is not None for s in build("cancel", KITCHEN, [0.0] * 200)]
    assert 0.8 < sum(leavers) / 200 < 1.0


def test_hostile_tenants_have_other_keys_than_the_polite_one() -> None:
    sessions = build("hostile", KITCHEN, [0.0] * 200)
    assert {session.tenant for session in sessions if session.kind == "polite"} == {0}
    assert {session.tenant for session in sessions if session.kind != "polite"} == {1, 2, 3}
    assert any(session.turns[0].refusal_expected for session in sessions)


def test_pictures_are_whole_files_and_differ() -> None:
    one, other = png(1, side=20), png(2, side=20)
    assert one != other
    start = one.index(b"IDAT") + 4
    size = int.from_bytes(one[start - 8 : start - 4], "big")
    assert len(zlib.decompress(one[start : start + size])) == 20 * (1 + 3 * 20)


def test_draws_stay_inside_their_bounds() -> None:
    sizes = Sizes(vary=0.0)
    assert sizes.drawn(7, random.Random(0)) == 7
    assert Sizes(vary=0.9).drawn(1, random.Random(0)) >= 1
