"""Each baseline against numbers worked out by hand from its published formula (``baselines.py`` names the sources)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from epdserve.loadtest.simulator.baselines import (
    Dynamo,
    LeastTokens,
    LlmD,
    Parameters,
    PowerOfTwo,
    RoundRobin,
    SessionAffinity,
    SGLang,
)
from epdserve.loadtest.simulator.cluster import Cluster, ClusterSpec
from epdserve.loadtest.simulator.requests import BLOCK_TOKENS, Request
from epdserve.loadtest.simulator.view import View
from epdserve.services.policy.pools import Floats, floats
from support.simulated import workload


def view(*, queued: list[float], requests: list[int], running: list[int], held: list[float]) -> View:
    made = View(Cluster(ClusterSpec(len(queued), len(running), decode_tokens=1000), urgent=False))
    made.prefill_tokens[10] = queued
    made.prefill_requests[:] = requests
    made.decode_running[:] = running
    made.decode_held[:] = held
    return made


SCENE = view(queued=[4096, 1024, 0], requests=[3, 2, 5], running=[7, 4, 9], held=[300, 900, 500])
REQUEST: Request = replace(workload().requests[0], prompt_tokens=2048, blocks=(), session=17)


def hits(pages: list[int], host: list[int] | None = None) -> Floats:
    """Blocks by worker, as tokens by tier."""
    own, all_of_it = floats(pages) * BLOCK_TOKENS, floats(host or pages) * BLOCK_TOKENS
    return np.stack((own, all_of_it, all_of_it, all_of_it))


def test_round_robin_takes_the_next() -> None:
    policy = RoundRobin()
    routed = [policy.route(REQUEST, SCENE, 0.0) for _ in range(4)]
    assert [(one.prefill, one.decode) for one in routed if one] == [(1, 1), (2, 2), (0, 0), (1, 1)]


def test_power_of_two_takes_the_less_loaded_of_two_drawn() -> None:
    policy = PowerOfTwo(seed=1)
    drawn = Counter(policy.prefill(REQUEST, SCENE, hits([0, 0, 0])) for _ in range(9000))
    # Of 9 equally likely draws the worker with 2 requests wins 5, the one with 3 wins 3, the one with 5 only its own
    assert [drawn[worker] / 1000 for worker in (1, 0, 2)] == pytest.approx([5, 3, 1], abs=0.25)
    decodes = Counter(policy.decode(REQUEST, SCENE) for _ in range(9000))
    assert [decodes[worker] / 1000 for worker in (1, 0, 2)] == pytest.approx([5, 3, 1], abs=0.25)


def test_least_tokens() -> None:
    policy = LeastTokens()
    assert policy.prefill(REQUEST, SCENE, hits([9, 9, 0])) == 2
    assert policy.decode(REQUEST, SCENE) == 0


def test_a_session_stays_where_it_is() -> None:
    policy = SessionAffinity()
    places = {policy.prefill(REQUEST, SCENE, hits([0, 0, 0])) for _ in range(9)}
    assert len(places) == 1
    others = {policy.prefill(replace(REQUEST, session=n), SCENE, hits([0, 0, 0])) for n in range(50)}
    assert others == {0, 1, 2}


@pytest.mark.parametrize(
    ("parameters", "pages", "host", "chosen"),
    [
        # Blocks of 512, prompt of 4. Prefill blocks there and for this prompt, less the overlap: 8+4, 2+4, 0+4
        ({}, [0, 0, 0], None, 2),
        # 12 - 4 = 8, 6 - 3 = 3, 4 - 0 = 4
        ({}, [4, 3, 0], None, 1),
        # Twice the weight: 12 - 8 = 4, 6 - 4 = 2, 4 - 3 = 1 is not 4 - 2 = 2
        ({"overlap_weight": 2.0}, [4, 2, 1], None, 1),
        # Host blocks count for 0.75: 6 - 0.75 * 4 = 3 is less than 4
        ({}, [0, 0, 0], [0, 4, 0], 1),
        # And for nothing if they are to
        ({"host_weight": 0.0}, [0, 0, 0], [0, 4, 0], 2),
    ],
)
def test_dynamo_cost(parameters: Parameters, pages: list[int], host: list[int] | None, chosen: int) -> None:
    policy = Dynamo(parameters)
    assert policy.prefill(REQUEST, SCENE, hits(pages, host)) == chosen
    assert policy.decode(REQUEST, SCENE) == 0  # (300, 900, 500) + 2048 tokens


def test_dynamo_draws_by_softmax_of_the_costs_over_their_spread() -> None:
    policy = Dynamo({"temperature": 0.5}, seed=1)
    drawn = Counter(policy.prefill(REQUEST, SCENE, hits([0, 0, 0])) for _ in range(6000))
    # Costs 12, 6, 4 are 1, 1/4, 0 of their spread: weights exp(-2), exp(-1/2), 1
    weights = np.exp([-2.0, -0.5, 0.0])
    assert [drawn[worker] / 6000 for worker in range(3)] == pytest.approx(weights / weights.sum(), abs=0.02)


@pytest.mark.parametrize(
    ("parameters", "pages", "chosen"),
    [
        # In balance (5 - 2 = 3 is not above 64): the longest match, if it is above 0.3 of the prompt (4 blocks)
        ({}, [0, 0, 2], 2),
        ({}, [0, 0, 1], 1),  # 0.25 is not: the least loaded
        ({"cache_threshold": 0.2}, [0, 0, 1], 2),
        # Out of balance (3 > 2 and 5 > 1.5 * 2): the shortest queue whatever is cached
        ({"abs_threshold": 2.0}, [0, 0, 4], 1),
        # Both bounds must be passed: 5 is not above 3 * 2
        ({"abs_threshold": 2.0, "rel_threshold": 3.0}, [0, 0, 4], 2),
    ],
)
def test_sglang_thresholds(parameters: Parameters, pages: list[int], chosen: int) -> None:
    assert SGLang(parameters).prefill(REQUEST, SCENE, hits(pages)) == chosen


@pytest.mark.parametrize(
    ("parameters", "pages", "chosen"),
    [
        # Queue scores (5 - q) / 3: 2/3, 1, 0. Prefix scores 0: twice these
        ({}, [0, 0, 0], 1),
        # 3 * 2/4 + 2 * 2/3 = 2.83 against 2
        ({}, [2, 0, 0], 0),
        # 3 * 1/4 + 4/3 = 2.08 against 2, and with half the weight of the prefix 1.71
        ({}, [1, 0, 0], 0),
        ({"prefix": 1.5}, [1, 0, 0], 1),
        ({}, [0, 0, 4], 2),  # 3 against 2
        ({"queue": 4.0}, [0, 0, 4], 1),  # 3 against 4
    ],
)
def test_llm_d_scores(parameters: Parameters, pages: list[int], chosen: int) -> None:
    assert LlmD(parameters).prefill(REQUEST, SCENE, hits(pages)) == chosen


def test_llm_d_decodes_by_queue_and_free_memory() -> None:
    # Queue (9 - q) / 5: 0.4, 1, 0; free of 1000 tokens: 0.7, 0.1, 0.5. Twice the sum: 2.2, 2.2, 1.0
    assert LlmD({"queue": 1.99}).decode(REQUEST, SCENE) == 0
    assert LlmD({"queue": 2.01}).decode(REQUEST, SCENE) == 1
    assert LlmD({"memory": 0.0}).decode(REQUEST, SCENE) == 1


@pytest.mark.parametrize(("cap_s", "refused"), [(0.0, False), (1.0, False), (1e-3, True)])
def test_the_bound_on_the_queue_counts_prompt_work_a_worker(cap_s: float, refused: bool) -> None:
    assert (LeastTokens({"cap_s": cap_s}).route(REQUEST, SCENE, 0.0) is None) == refused
