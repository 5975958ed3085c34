"""What is compiled gives the same bits as the formulas in numpy."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from epdserve.services.policy import joint
from epdserve.services.policy.forecast import LengthForecast
from epdserve.services.policy.joint import PlacementSettings, place
from epdserve.services.policy.pools import DecodePool, Links, PrefillPool
from hypothesis import given, settings
from hypothesis import strategies as st
from support import native
from support.policy_pools import decode_pool, placing, prefill_pool

SOURCE = Path(joint.__file__).with_name("pair_costs.c")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return native.compiled(SOURCE, "_pair_costs", tmp_path_factory.mktemp("native"), "-ffp-contract=off")


def pools(seed: int, prefills: int, decodes: int, *, equal: bool) -> tuple[PrefillPool, DecodePool]:
    """Workers in any state; with ``equal``, of only a few kinds, so that many tie."""
    draw = np.random.default_rng(seed)

    def some(low: float, high: float, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        found = draw.uniform(low, high, count)
        return np.round(found / high * 2) * high / 2 + low if equal else found

    hits = np.sort(draw.integers(0, 12_000, (4, prefills)).astype(float), axis=0)
    hits[:, draw.random(prefills) < 0.4] = 0.0
    speeds = (
        np.stack([some(1e6, 1e10, prefills) for _ in range(4)])
        if seed % 2
        else np.array([1.0, 1e10, 1e9, 5e8])
    )
    return (
        prefill_pool(
            prefills,
            machines=draw.integers(0, 1 + prefills // 2, prefills),
            ahead_tokens=some(0, 1e5, prefills),
            tokens_per_s=some(1e3, 3e4, prefills),
            hit_tokens=hits,
            fetch_bytes_per_s=speeds,
            trouble_s=np.where(draw.random(prefills) < 0.1, 1e6, 0.0),
        ),
        decode_pool(
            decodes,
            machines=draw.integers(0, 1 + prefills // 2, decodes),
            running=np.floor(some(0, 60, decodes)),
            held_tokens=some(0, 9e5, decodes),
            remaining_tokens=some(0, 1e5, decodes),
            hit_tokens=some(0, 5e3, decodes),
            step_s=some(0.01, 0.1, decodes),
            request_s=some(1e-4, 1e-3, decodes),
            token_s=some(1e-9, 1e-8, decodes),
            trouble_s=np.where(draw.random(decodes) < 0.1, 3.0, 0.0),
        ),
    )


@given(
    st.integers(0, 10_000),
    st.integers(1, 60),
    st.integers(1, 60),
    st.booleans(),
    st.sampled_from([1, 3, 8, 64]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 0.4]),
)
@settings(max_examples=80, deadline=None)
def test_every_number_is_the_same(
    compiled: ModuleType,
    seed: int,
    prefills: int,
    decodes: int,
    equal: bool,
    shortlist: int,
    tiers: bool,
    lengths: bool,
    transfer: bool,
    stale_s: float,
) -> None:
    both = pools(seed, prefills, decodes, equal=equal)
    draw = np.random.default_rng(seed + 1)
    mean = float(draw.integers(1, 4000))
    request = placing(
        prompt_tokens=int(draw.integers(1, 20_000)),
        rerun_tokens=int(draw.choice([0, 128])),
        forecast=LengthForecast(mean / 2, mean * 3, (mean / 2, mean, 2 * mean)),
        affinity=b"some",
        staleness_s=stale_s,
    )
    links = Links(4e9, 1e9, 0.001, 3e6, 0.004)
    chosen = PlacementSettings(
        shortlist=shortlist, tier_weights=tiers, use_lengths=lengths, use_transfer=transfer
    )
    found = []
    for way in (compiled, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(joint, "_native", way)
            decision = place(*both, links, request, chosen)
        pairs = decision.looked_at
        arrays = (pairs.costs, pairs.ttft_s, pairs.tpot_s, pairs.hits, pairs.compute)
        found.append(
            (
                decision.chosen,
                decision.compute_tokens,
                [*pairs.rows],
                [*pairs.columns],
                [a.tolist() for a in arrays],
            )
        )
    assert found[0] == found[1]


def test_what_is_no_pool_is_refused(compiled: ModuleType) -> None:
    prefills, decodes = pools(2, 3, 3, equal=False)
    sources = [prefills.machines, prefills.ahead_tokens, prefills.tokens_per_s]
    sources += [prefills.hit_tokens, prefills.fetch_bytes_per_s, prefills.trouble_s]
    names = ("running", "held_tokens", "remaining_tokens", "total_tokens", "step_s", "request_s", "token_s")
    targets = [decodes.machines, *(getattr(decodes, name) for name in (*names, "hit_tokens", "trouble_s"))]
    numbers = (1.0,) * 18
    assert len(compiled.weigh(tuple(sources), tuple(targets), 4, 8, numbers)) == 7
    short = (*sources[:1], sources[1][:2], *sources[2:])
    for wrong, tiers, shortlist, error in [
        (short, 4, 8, ValueError),
        (tuple(sources), 3, 8, ValueError),
        (tuple(sources), 4, 0, ValueError),
        (tuple(sources), 4, 65, ValueError),
        (tuple(sources[1:]), 4, 8, TypeError),
        ((sources[0].astype(float), *sources[1:]), 4, 8, TypeError),
        ((sources[0], sources[1].astype(np.int64), *sources[2:]), 4, 8, TypeError),
    ]:
        with pytest.raises(error):
            compiled.weigh(wrong, tuple(targets), tiers, shortlist, numbers)
