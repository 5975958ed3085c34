from __future__ import annotations

import pytest
from epdserve.services.errors import InvalidRequest
from epdserve.services.router.grants import Granting, Grants
from epdserve.services.router.slo import (
    CLASS_HEADER,
    PRIORITY_HEADER,
    TTFT_HEADER,
    SloSettings,
    SloWish,
    promised,
    wish_of_headers,
)
from epdserve.services.types import Effort

FIRST = [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}]
SECOND = [*FIRST, {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]


def headers(**values: str) -> SloWish:
    return wish_of_headers(lambda name: values.get(name.replace("-", "_"), ""))


def test_headers_are_read_and_fields_win() -> None:
    wish = headers(x_slo_class="batch", x_ttft_target_s="1.5", x_priority="-3")
    assert wish == SloWish("batch", 1.5, None, -3)
    assert SloWish("standard", None, 0.1, None).over(wish) == SloWish("standard", 1.5, 0.1, -3)
    assert not headers().asks
    assert not headers(x_priority="1").asks
    assert headers(x_tpot_target_s="0.2").asks


@pytest.mark.parametrize("value", ["nan", "soon", "-1", "1e9", "inf"])
def test_bad_headers_are_refused_by_name(value: str) -> None:
    for name in (TTFT_HEADER, PRIORITY_HEADER):
        if (name, value) == (PRIORITY_HEADER, "-1"):
            continue
        with pytest.raises(InvalidRequest) as refusal:
            headers(**{name.replace("-", "_"): value})
        assert refusal.value.param == name


def test_own_targets_stand_in_place_of_the_class_and_unknown_classes_are_refused() -> None:
    slo = promised(SloWish("standard", ttft_target_s=1.0), SloSettings())
    assert (slo.name, slo.ttft_s, slo.tpot_s, slo.room) == ("standard", 1.0, 0.08, 0.85)
    assert promised(SloWish(), SloSettings()).name == "interactive"
    with pytest.raises(InvalidRequest, match="interactive, standard, batch"):
        promised(SloWish("gold"), SloSettings())
    assert CLASS_HEADER == "x-slo-class"


def test_a_conversation_keeps_the_effort_it_was_granted() -> None:
    grants = Grants()
    calm, short = Granting(grants, "t"), Granting(grants, "t", lower=True)
    asked = Effort(100)
    effort, name, turn = short.effort(FIRST, asked, 25)
    assert (effort, turn) == (Effort(25), 1)
    assert calm.effort(SECOND, asked, 25)[0] == asked  # nothing was granted yet
    grants.grant(name, Effort(25))
    assert calm.effort(SECOND, asked, 25) == (Effort(25), name, 2)
    assert calm.effort(SECOND, asked, None)[0] == asked  # it takes no less any more
    assert calm.effort(SECOND, asked, 50)[0] == asked
    assert Granting(grants, "other").effort(SECOND, asked, 25)[0] == asked
    assert calm.effort(SECOND, None, 25)[0] is None
    assert short.effort(SECOND, asked, 25)[0] == Effort(25)


def test_a_later_turn_is_never_lowered() -> None:
    assert Granting(Grants(), "t", lower=True).effort(SECOND, Effort(100), 25)[0] == Effort(100)


def test_grants_are_bounded() -> None:
    grants = Grants(limit=3)
    for number in range(9):
        grants.grant(bytes([number]), Effort(25))
    assert (len(grants), grants.granted(bytes([8])), grants.granted(bytes([0]))) == (3, Effort(25), None)
