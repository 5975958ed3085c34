from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from epdserve.services.policy.forecast import fixed
from epdserve.services.policy.joint import PlacementSettings, place
from epdserve.services.policy.pools import Links, PrefillPool, floats
from hypothesis import given, settings
from hypothesis import strategies as st
from support.policy_pools import decode_pool, placing, prefill_pool

LINKS = Links()


def test_ties_are_broken_by_name() -> None:
    chosen = place(prefill_pool(4), decode_pool(4), LINKS, placing()).chosen
    assert (chosen.prefill, chosen.decode) == ("p0", "d0")


def test_no_pair_is_an_error() -> None:
    with pytest.raises(ValueError, match="no pair"):
        place(prefill_pool(0), decode_pool(1), LINKS, placing())


def test_workers_must_be_sorted_by_name() -> None:
    pool = prefill_pool(2)
    with pytest.raises(ValueError, match="sorted"):
        PrefillPool(
            ["b", "a"],
            pool.machines,
            pool.ahead_tokens,
            pool.tokens_per_s,
            pool.hit_tokens,
            pool.fetch_bytes_per_s,
            pool.trouble_s,
        )


def test_a_hit_is_followed_until_the_queue_costs_more() -> None:
    held = {1: (9000.0,) * 4}
    assert (
        place(prefill_pool(2, hits=held, ahead={1: 5000}), decode_pool(2), LINKS, placing()).chosen.prefill
        == "p1"
    )
    assert (
        place(prefill_pool(2, hits=held, ahead={1: 30_000}), decode_pool(2), LINKS, placing()).chosen.prefill
        == "p0"
    )


def test_a_hit_weighs_what_its_tier_costs_to_load() -> None:
    # 9,000 tokens are 8 MB: from a host cache at once, from an SSD of 4 MB/s in two seconds
    held = {0: (0.0, 9000.0, 9000.0, 9000.0), 1: (0.0, 0.0, 9000.0, 9000.0)}
    slow = floats([1.0, 1e10, 4e6, 1e3])
    pool = prefill_pool(3, hits=held, fetch_bytes_per_s=slow)
    decision = place(pool, decode_pool(2), LINKS, placing())
    assert decision.chosen.prefill == "p0"
    assert decision.chosen.hit_tokens == 9000
    busy = prefill_pool(3, hits=held, fetch_bytes_per_s=slow, ahead={0: 50_000})
    assert place(busy, decode_pool(2), LINKS, placing()).chosen.hit_tokens == 0


def test_a_hit_within_the_rerun_rows_is_none() -> None:
    pool = prefill_pool(2, hits={1: (100.0,) * 4})
    assert place(pool, decode_pool(1), LINKS, placing(rerun_tokens=128)).compute_tokens == 10_000


def test_the_transfer_decides_between_equal_decode_workers() -> None:
    slow = Links(other_machine_bytes_per_s=1e7)
    pool = prefill_pool(4, hits={2: (9000.0,) * 4})
    assert place(pool, decode_pool(4), slow, placing()).chosen.decode == "d2"


def test_prefill_goes_where_decode_must_if_the_link_is_slow() -> None:
    slow = Links(other_machine_bytes_per_s=1e7)
    full = decode_pool(4, running=floats([900, 900, 1, 900]))
    assert (
        place(prefill_pool(4, ahead={2: 100, 3: 50}), full, slow, placing()).chosen
        == (place(prefill_pool(4, ahead={2: 100, 3: 50}), full, slow, placing()).explain(1)[0])
    )
    assert place(prefill_pool(4, ahead={2: 100, 3: 50}), full, slow, placing()).chosen.prefill == "p3"


def test_decode_load_is_what_is_still_to_come_not_how_many_are_there() -> None:
    few_long = decode_pool(2, running=floats([10, 12]), remaining_tokens=floats([50_000, 600]))
    assert place(prefill_pool(1), few_long, LINKS, placing()).chosen.decode == "d1"


def test_a_worker_whose_pages_will_not_suffice_comes_last() -> None:
    pool = decode_pool(2, held_tokens=floats([995_000, 0]), running=floats([1, 60]))
    assert place(prefill_pool(1), pool, LINKS, placing()).chosen.decode == "d1"


def test_trouble_is_avoided() -> None:
    pool = prefill_pool(2, trouble_s=floats([3.0, 0.0]), ahead={1: 20_000})
    decodes = decode_pool(2, trouble_s=floats([3.0, 0.0]))
    chosen = place(pool, decodes, LINKS, placing()).chosen
    assert (chosen.prefill, chosen.decode) == ("p1", "d1")


def test_stale_loads_spread_requests_over_equals_and_fresh_ones_do_not() -> None:
    pools = prefill_pool(8), decode_pool(8)
    stale = Counter(
        place(*pools, LINKS, placing(request_id=str(n), staleness_s=0.5)).chosen.prefill for n in range(120)
    )
    fresh = {place(*pools, LINKS, placing(request_id=str(n))).chosen.prefill for n in range(20)}
    assert len(stale) == 8
    assert max(stale.values()) < 45
    assert fresh == {"p0"}


def test_prompts_that_share_a_beginning_stay_together_before_it_is_cached() -> None:
    pools = prefill_pool(8), decode_pool(8)
    places = {
        place(*pools, LINKS, placing(request_id=str(n), affinity=b"agent", staleness_s=0.5)).chosen.prefill
        for n in range(50)
    }
    assert len(places) == 1


def test_a_clear_difference_beats_staleness() -> None:
    pool = prefill_pool(4, ahead={0: 40_000, 1: 40_000, 3: 40_000})
    chosen = {
        place(pool, decode_pool(1), LINKS, placing(request_id=str(n), staleness_s=1.0)).chosen.prefill
        for n in range(50)
    }
    assert chosen == {"p2"}


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), prompt=st.sampled_from([1, 200, 5000, 1_000_000]))
def test_the_shortlist_finds_the_best_of_all_pairs(seed: int, prompt: int) -> None:
    draw = np.random.default_rng(seed)
    prefills = prefill_pool(
        9, ahead_tokens=draw.random(9) * 1e4, hit_tokens=np.cumsum(draw.random((4, 9)) * 3000, axis=0)
    )
    decodes = decode_pool(9, running=np.floor(draw.random(9) * 50), remaining_tokens=draw.random(9) * 1e4)
    request = placing(prompt_tokens=prompt, forecast=fixed(300))
    found = place(prefills, decodes, Links(other_machine_bytes_per_s=1e9), request)
    wide = PlacementSettings(shortlist=9)
    best = place(prefills, decodes, Links(other_machine_bytes_per_s=1e9), request, wide)
    assert found.chosen.cost <= best.chosen.cost + 0.02
    assert best.chosen.cost == min(one.cost for one in best.explain(81))
    assert len(best.explain(1000)) == 81


def test_bad_news_of_any_kind_gives_a_choice() -> None:
    for prompt, speed in product((1, 10**6), (1e-3, 1e9)):
        pool = prefill_pool(2, tokens_per_s=floats([speed, 1.0]))
        assert place(pool, decode_pool(2), LINKS, placing(prompt_tokens=prompt)).chosen.prefill in (
            "p0",
            "p1",
        )
