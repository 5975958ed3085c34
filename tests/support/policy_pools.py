"""Pools for tests of placement: equal, idle workers, changed one by one."""

from typing import Any

import numpy as np
from epdserve.services.policy.forecast import fixed
from epdserve.services.policy.joint import Placing
from epdserve.services.policy.pools import DecodePool, Floats, PrefillPool, floats


def prefill_pool(
    count: int,
    *,
    ahead: dict[int, float] | None = None,
    hits: dict[int, tuple[float, float, float, float]] | None = None,
    **arrays: Floats,
) -> PrefillPool:
    """Workers ``p0``, ``p1``, ... two to a machine; ``hits`` are tokens by tier: pages, host, SSD, peers."""
    ahead_tokens, hit_tokens = np.zeros(count), np.zeros((4, count))
    for worker, tokens in (ahead or {}).items():
        ahead_tokens[worker] = tokens
    for worker, tiers in (hits or {}).items():
        hit_tokens[:, worker] = tiers
    fields: dict[str, Any] = {
        "machines": np.arange(count) // 2,
        "ahead_tokens": ahead_tokens,
        "tokens_per_s": np.full(count, 10_000.0),
        "hit_tokens": hit_tokens,
        "fetch_bytes_per_s": floats([1.0, 1e10, 1e9, 5e9]),
        "trouble_s": np.zeros(count),
    }
    return PrefillPool([f"p{index:0{len(str(count - 1))}}" for index in range(count)], **{**fields, **arrays})


def decode_pool(count: int, **arrays: Floats) -> DecodePool:
    """Workers ``d0``, ``d1``, ... two to a machine."""
    fields: dict[str, Any] = {
        "machines": np.arange(count) // 2,
        **{name: np.zeros(count) for name in ("running", "held_tokens", "remaining_tokens", "hit_tokens")},
        "total_tokens": np.full(count, 1e6),
        "step_s": np.full(count, 0.02),
        "request_s": np.full(count, 1e-4),
        "token_s": np.full(count, 1e-9),
        "trouble_s": np.zeros(count),
    }
    return DecodePool([f"d{index:0{len(str(count - 1))}}" for index in range(count)], **{**fields, **arrays})


def placing(**changes: Any) -> Placing:
    """A prompt of 10,000 tokens with an answer of 500."""
    fields: dict[str, Any] = {
        "request_id": "r",
        "prompt_tokens": 10_000,
        "forecast": fixed(500),
        "ttft_target_s": 2.0,
        "tpot_target_s": 0.05,
        "bytes_per_token": 890.0,
    }
    return Placing(**{**fields, **changes})
