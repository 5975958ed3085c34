"""Fetch or recompute, by the numbers."""

import pytest
from epdserve.services.policy.fetching import Chain, Speeds, blocks_to_fetch, tail_is_worth_it
from hypothesis import given
from hypothesis import strategies as st

MB = 10**6
FAST = Speeds(prefill_tokens_per_s=1000, bytes_per_s={"host": 10_000 * MB, "ssd": 1000 * MB, "peer": 1 * MB})


def fetched(
    *runs: tuple[str, int], speeds: Speeds = FAST, held: int = 0, prompt: int = 12_800, rerun: int = 128
) -> int:
    chain = Chain(held, runs, block_tokens=128, block_bytes=1 * MB)
    return blocks_to_fetch(chain, speeds, prompt_tokens=prompt, rerun_tokens=rerun)


def test_fast_tiers_are_fetched() -> None:
    assert fetched(("host", 40), ("ssd", 20)) == 60


def test_a_slow_link_loses_against_the_model() -> None:
    assert fetched(("host", 40), ("peer", 20)) == 40  # 1 s a block against 0.128
    assert fetched(("peer", 20)) == 0


def test_a_slow_stretch_before_a_fast_one_is_judged_with_it() -> None:
    assert fetched(("peer", 1), ("host", 50)) == 51
    assert fetched(("peer", 20), ("host", 10)) == 0


def test_a_hit_of_no_more_than_what_is_run_again_is_none() -> None:
    assert fetched(("host", 1)) == 0
    assert fetched(("host", 2)) == 2
    assert fetched(("host", 20), rerun=2560) == 0
    assert fetched(("host", 1), held=1) == 1


def test_the_last_token_is_computed_anyway() -> None:
    assert fetched(("host", 1), held=3, prompt=3 * 128 + 1) == 0


def test_latency_of_a_fetch_counts() -> None:
    slow_door = Speeds(prefill_tokens_per_s=100_000, bytes_per_s={"host": 10_000 * MB}, latency_s=0.02)
    assert fetched(("host", 8), speeds=slow_door) == 0
    assert fetched(("host", 80), speeds=slow_door) == 80


def test_what_was_not_measured_is_tried() -> None:
    unknown = Speeds(prefill_tokens_per_s=0.0, bytes_per_s={})
    assert fetched(("peer", 20), speeds=unknown) == 20
    assert fetched(("ssd", 20), speeds=Speeds(prefill_tokens_per_s=1e9, bytes_per_s={})) == 20


@pytest.mark.parametrize(("saved", "worth"), [(0, False), (10, True), (128, True)])
def test_tails(saved: int, worth: bool) -> None:
    assert tail_is_worth_it(FAST, tail_bytes=3 * MB, saved_tokens=saved) is worth


def test_a_tail_behind_a_slow_door_is_replayed_instead() -> None:
    slow = Speeds(prefill_tokens_per_s=100_000, bytes_per_s={"host": 100 * MB})
    assert not tail_is_worth_it(slow, tail_bytes=3 * MB, saved_tokens=128)


@given(
    runs=st.lists(st.tuples(st.sampled_from(["host", "ssd", "peer"]), st.integers(1, 50)), max_size=4),
    held=st.integers(0, 40),
    prompt=st.integers(1, 20_000),
    rerun=st.integers(1, 3000),
)
def test_only_whole_runs_are_chosen_and_only_if_they_save_rows(
    runs: list[tuple[str, int]], held: int, prompt: int, rerun: int
) -> None:
    count = fetched(*runs, held=held, prompt=prompt, rerun=rerun)
    ends = [sum(blocks for _, blocks in runs[: n + 1]) for n in range(len(runs))]
    assert count in [0, *ends]
    assert not count or (held + count) * 128 > rerun
