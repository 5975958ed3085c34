from __future__ import annotations

import gzip
import json
import statistics
from pathlib import Path

import pytest
from epdserve.loadtest.simulator.capacity import capacity
from epdserve.loadtest.simulator.cluster import ClusterSpec
from epdserve.loadtest.simulator.requests import BLOCK_TOKENS, effort_ratio
from epdserve.loadtest.simulator.workloads import SHAPES, generate, load_trace
from support.simulated import workload


@pytest.mark.parametrize("name", SHAPES)
def test_a_workload_comes_at_its_rate_from_its_first_second_on(name: str) -> None:
    made = generate(SHAPES[name], seconds=30.0, rate=20.0, seed=3).requests
    assert 420 < len(made) < 800
    assert 0.6 < sum(one.arrives_at < 15 for one in made) / (len(made) / 2) < 1.5
    assert [one.number for one in made] == list(range(len(made)))
    assert all(len(one.blocks) == one.prompt_tokens // BLOCK_TOKENS for one in made)


def test_turns_of_a_session_share_all_that_went_before() -> None:
    made = workload(seconds=60.0, rate=5.0).requests
    by_session: dict[int, list[int]] = {}
    shared = 0
    for index, one in enumerate(made):
        before = by_session.setdefault(one.session, [])
        if before:
            earlier = made[before[-1]]
            assert one.blocks[: len(earlier.answer_blocks)] == earlier.answer_blocks
            assert one.effort == earlier.effort
            shared += 1
        before.append(index)
    assert shared > 20


def test_effort_doubles_the_output_every_25() -> None:
    assert [effort_ratio(effort) for effort in (25, 50, 75, 100)] == [0.25, 0.5, 1.0, 2.0]
    one = workload().requests[0]
    assert one.output_at(one.effort) == one.output_tokens


def test_a_public_trace_is_read_at_the_rate_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "mooncake_conversation.jsonl.gz"
    rows = [
        {"timestamp": 1000 * n, "input_length": 1500, "output_length": 100, "hash_ids": [0, n]}
        for n in range(200)
    ]
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    made = load_trace(path, SHAPES["conversation"], seconds=10.0, rate=10.0, seed=1)
    assert len(made.requests) == 100
    assert made.requests[-1].arrives_at == pytest.approx(10.0, rel=0.1)
    assert {len(one.blocks) for one in made.requests} == {2}
    mean = statistics.fmean(one.output_tokens for one in made.requests)
    assert 25 <= mean <= 200


def test_an_azure_trace_has_no_blocks_and_gets_its_own(tmp_path: Path) -> None:
    path = tmp_path / "azure_code.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        file.writelines(f"2023-11-16 18:17:{n:02}.9799600,4808,10\n" for n in range(60))
    made = load_trace(path, SHAPES["code"], seconds=4.0, rate=10.0, seed=1).requests
    assert len({block for one in made for block in one.blocks}) == 40 * 9


def test_capacity_grows_with_the_workers() -> None:
    some = workload(seconds=10.0)
    few, many = (capacity(ClusterSpec(prefills=count, decodes=3), some) for count in (2, 4))
    assert many == pytest.approx(2 * few)
