from __future__ import annotations

import pytest
from epdserve.services.policy.placement import DecodeLoad, PrefillLoad, choose_decode, choose_prefill


def test_the_longest_hit_wins_on_idle_workers() -> None:
    loads = [PrefillLoad("a", 0, 0), PrefillLoad("b", 0, 512), PrefillLoad("c", 0, 256)]
    assert choose_prefill(loads, prompt_tokens=1000) == "b"


def test_a_queue_longer_than_the_hit_loses_it() -> None:
    loads = [PrefillLoad("a", 0, 0), PrefillLoad("b", 513, 512)]
    assert choose_prefill(loads, prompt_tokens=1000) == "a"


def test_what_the_machines_store_holds_need_not_be_computed() -> None:
    loads = [PrefillLoad("a", 300, 0), PrefillLoad("b", 0, 0, 512), PrefillLoad("c", 0, 256)]
    assert choose_prefill(loads, prompt_tokens=1000) == "b"


def test_of_two_beside_one_store_the_one_that_holds_more_itself_is_taken() -> None:
    loads = [PrefillLoad("a", 0, 0, 512), PrefillLoad("b", 0, 512, 512), PrefillLoad("c", 0, 256, 512)]
    assert choose_prefill(loads, prompt_tokens=1000) == "b"


def test_ties_are_broken_by_name() -> None:
    assert choose_prefill([PrefillLoad("b", 5, 0), PrefillLoad("a", 5, 0)], prompt_tokens=10) == "a"
    assert choose_decode([DecodeLoad("b", 5, 9, 1), DecodeLoad("a", 5, 9, 1)], needed_tokens=1) == "a"


def test_a_full_hit_still_costs_one_token() -> None:
    loads = [PrefillLoad("a", 0, 99), PrefillLoad("b", 0, 100)]
    assert choose_prefill(loads, prompt_tokens=100) == "a"


def test_decode_prefers_the_least_full_worker_whatever_its_size() -> None:
    loads = [DecodeLoad("big", 500, 10_000, 9), DecodeLoad("small", 100, 1_000, 0)]
    assert choose_decode(loads, needed_tokens=100) == "big"


def test_decode_avoids_a_worker_where_the_request_does_not_fit() -> None:
    loads = [DecodeLoad("small", 0, 100, 0), DecodeLoad("big", 900, 2_000, 50)]
    assert choose_decode(loads, needed_tokens=101) == "big"


def test_decode_takes_the_emptiest_when_it_fits_nowhere() -> None:
    loads = [DecodeLoad("a", 90, 100, 0), DecodeLoad("b", 50, 100, 0)]
    assert choose_decode(loads, needed_tokens=101) == "b"


def test_equal_fullness_goes_to_the_shorter_step_loop() -> None:
    loads = [DecodeLoad("a", 10, 100, 3), DecodeLoad("b", 10, 100, 2)]
    assert choose_decode(loads, needed_tokens=1) == "b"


def test_no_candidates_is_an_error() -> None:
    with pytest.raises(ValueError, match="no prefill"):
        choose_prefill([], prompt_tokens=1)
    with pytest.raises(ValueError, match="no decode"):
        choose_decode([], needed_tokens=1)


def test_impossible_loads_are_refused() -> None:
    with pytest.raises(ValueError, match="negative load"):
        PrefillLoad("a", -1, 0)
    with pytest.raises(ValueError, match="impossible load"):
        DecodeLoad("a", 0, 0, 0)
