from __future__ import annotations

from dataclasses import replace

import pytest
from epdserve.services.policy.forecast import fixed
from epdserve.services.policy.gate import Outlook, SloClass, Verdict, decide, lowering_pays
from hypothesis import given
from hypothesis import strategies as st

SLO = SloClass("interactive", 2.0, 0.05)
GOOD = Outlook(0.5, 0.02)


def test_who_will_be_in_time_enters() -> None:
    assert decide(GOOD, SLO).verdict is Verdict.ENTER


@pytest.mark.parametrize(("outlook", "reason"), [(Outlook(2.1, 0.02), "ttft"), (Outlook(0.5, 0.06), "tpot")])
def test_a_predicted_miss_is_refused_and_says_why(outlook: Outlook, reason: str) -> None:
    answer = decide(outlook, SLO)
    assert (answer.verdict, answer.reason) == (Verdict.REFUSE, reason)
    assert answer.retry_after_s >= 1


def test_retry_after_is_when_the_queue_will_have_shrunk() -> None:
    soon = decide(Outlook(7.0, 0.02, drain_ratio=1.0), SLO)
    late = decide(Outlook(7.0, 0.02, drain_ratio=0.25), SLO)
    assert (soon.retry_after_s, late.retry_after_s) == (5.0, 20.0)
    assert decide(Outlook(1e9, 0.02), SLO).retry_after_s == 60.0


def test_classes_are_shed_one_after_the_other() -> None:
    batch = replace(SLO, name="batch", room=0.5)
    verdicts = [
        [decide(Outlook(ttft_s, 0.02), slo).verdict for slo in (SLO, batch)] for ttft_s in (0.5, 1.5, 2.5)
    ]
    assert verdicts == [
        [Verdict.ENTER, Verdict.ENTER],
        [Verdict.ENTER, Verdict.REFUSE],
        [Verdict.REFUSE, Verdict.REFUSE],
    ]


def test_a_tenant_above_its_share_gives_way_only_when_room_gets_short() -> None:
    assert decide(replace(GOOD, excess=0.5), SLO).verdict is Verdict.ENTER
    answer = decide(Outlook(1.9, 0.02, excess=0.5), SLO)
    assert (answer.verdict, answer.reason) == (Verdict.REFUSE, "share")
    assert decide(Outlook(1.9, 0.02, excess=0.05), SLO).verdict is Verdict.ENTER


def test_of_a_tenant_above_its_share_the_long_prompts_are_refused_first() -> None:
    short = Outlook(1.0, 0.02, alone_ttft_s=0.02, excess=0.5)
    assert decide(short, SLO).verdict is Verdict.ENTER
    assert decide(replace(short, alone_ttft_s=0.5), SLO).verdict is Verdict.REFUSE


def test_where_nobody_waits_a_tenant_above_its_share_gets_what_it_asks_for() -> None:
    assert decide(Outlook(1.9, 0.004, alone_ttft_s=1.9, excess=50.0), SLO).verdict is Verdict.ENTER


@given(
    ttft_s=st.floats(0.001, 10),
    alone_ratio=st.floats(0, 1),
    tpot_s=st.floats(0.001, 0.2),
    excess=st.floats(-1, 10),
    less=st.floats(0, 1),
)
def test_whoever_expects_less_or_has_had_less_enters_where_another_does(
    ttft_s: float, alone_ratio: float, tpot_s: float, excess: float, less: float
) -> None:
    outlook = Outlook(ttft_s, tpot_s, alone_ttft_s=alone_ratio * ttft_s, excess=excess)
    if decide(outlook, SLO).verdict is Verdict.ENTER:
        assert decide(replace(outlook, excess=excess - less), SLO).verdict is Verdict.ENTER
        assert decide(replace(outlook, tpot_s=tpot_s * less), SLO).verdict is Verdict.ENTER
    else:
        answer = decide(outlook, SLO)
        assert 1 <= answer.retry_after_s <= 60
        assert answer.reason in ("ttft", "tpot", "share")


def test_less_effort_is_offered_where_decoding_is_what_is_short() -> None:
    assert decide(Outlook(0.5, 0.06), SLO, may_lower=True).verdict is Verdict.LESS_EFFORT
    assert decide(Outlook(2.5, 0.06), SLO, may_lower=True).verdict is Verdict.REFUSE
    assert decide(GOOD, SLO, may_lower=True).verdict is Verdict.ENTER


def test_lowering_must_save_more_than_the_lost_prefix_costs() -> None:
    few = Outlook(0.5, 0.05, hit_tokens=1000, prefill_tokens_per_s=10_000)
    many = replace(few, hit_tokens=900_000)
    assert lowering_pays(few, fixed(1000), fixed(500), same_conversation=False)
    assert not lowering_pays(many, fixed(1000), fixed(500), same_conversation=False)
    assert not lowering_pays(few, fixed(1000), fixed(500), same_conversation=True)


def test_targets_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        SloClass("none", 0.0, 1.0)
