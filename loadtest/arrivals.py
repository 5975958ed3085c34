"""When requests are sent. Open loop: a slow server does not slow the customers down, so queues show."""

import random


def poisson(rate_per_s: float, count: int, *, seed: int) -> list[float]:
    """Arrival times of ``count`` independent customers at ``rate_per_s`` on average.

    Returns:
        Ascending offsets in seconds from the start; the first one is 0.

    Raises:
        ValueError: The rate is not positive.
    """
    if rate_per_s <= 0:
        raise ValueError(f"rate_per_s must be positive, got {rate_per_s}")
    draw = random.Random(seed)
    offsets, now = [], 0.0
    for _ in range(count):
        offsets.append(now)
        now += draw.expovariate(rate_per_s)
    return offsets


def at_once(count: int) -> list[float]:
    """All ``count`` customers at the same moment."""
    return [0.0] * count
