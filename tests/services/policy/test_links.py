from __future__ import annotations

import random

import pytest
from epdserve.services.policy.joint import place
from epdserve.services.policy.links import LinkModel
from epdserve.services.policy.pools import Links, floats
from hypothesis import given
from hypothesis import strategies as st
from support.policy_pools import decode_pool, placing, prefill_pool


def seconds(links: Links, nbytes: float, *, same: bool) -> float:
    speed = links.same_machine_bytes_per_s if same else links.other_machine_bytes_per_s
    return (links.latency_s if same else links.other_latency_s) + (nbytes + links.fixed_bytes) / speed


def test_the_default_holds_until_something_was_seen() -> None:
    assert LinkModel(Links(1e9, 2e9, 0.1, 5.0, 0.2)).links == Links(1e9, 2e9, 0.1, 5.0, 0.2)


def test_latency_and_speed_of_each_kind_are_learnt_apart() -> None:
    true, model, draw = Links(5e9, 1e8, 0.004, 3e6, 0.03), LinkModel(), random.Random(1)
    for _ in range(200):
        nbytes = draw.uniform(1e6, 2e8)
        for same in (True, False):
            noise = draw.uniform(0.8, 1.25)
            model.observe(same_machine=same, nbytes=nbytes, seconds=noise * seconds(true, nbytes, same=same))
    for same in (True, False):
        for nbytes in (2e6, 1e8):
            ratio = seconds(model.links, nbytes, same=same) / seconds(true, nbytes, same=same)
            assert 0.75 < ratio < 1.3
    assert model.links.fixed_bytes == 3e6
    assert model.handoffs == 400


def test_a_link_that_became_slow_is_followed() -> None:
    model, draw = LinkModel(), random.Random(2)
    for slowness in (1.0, 20.0):
        for _ in range(300):
            nbytes = draw.uniform(1e6, 1e8)
            model.observe(same_machine=False, nbytes=nbytes, seconds=slowness * (0.002 + nbytes / 1e9))
    assert seconds(model.links, 5e7, same=False) == pytest.approx(20 * (0.002 + 5e7 / 1e9), rel=0.2)
    assert model.links.same_machine_bytes_per_s == Links().same_machine_bytes_per_s


@given(st.lists(st.tuples(st.floats(allow_nan=True), st.floats(allow_nan=True)), max_size=60))
def test_nonsense_leaves_sane_links(told: list[tuple[float, float]]) -> None:
    model = LinkModel()
    for nbytes, took_s in told:
        model.observe(same_machine=True, nbytes=nbytes, seconds=took_s)
    assert 1e3 <= model.links.same_machine_bytes_per_s <= 1e13
    assert 0 <= model.links.latency_s <= 10


def test_placement_leaves_a_machine_whose_link_to_others_was_seen_to_be_slow() -> None:
    # The prefill worker with the hit is alone on its machine, the idle decode worker on another one
    held = {0: (9000.0,) * 4}
    prefills = prefill_pool(4, hits=held)
    decodes = decode_pool(4, running=floats([90.0, 90.0, 0.0, 0.0]))
    model = LinkModel()
    before = place(prefills, decodes, model.links, placing()).chosen
    assert (before.prefill, before.decode) == ("p0", "d2")
    for nbytes in (1e6, 5e6, 9e6) * 20:
        model.observe(same_machine=False, nbytes=nbytes, seconds=1.0 + nbytes / 1e6)
    after = place(prefills, decodes, model.links, placing()).chosen
    assert (after.prefill, after.decode) != ("p0", "d2")
    assert after.prefill == ("p0" if after.decode in ("d0", "d1") else "p2")
