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


def bursts(rate_per_s: float, count: int, *, size: int, seed: int) -> list[float]:
    """``count`` customers at ``rate_per_s`` on average, who come ``size`` at a time at moments of chance.

    Raises:
        ValueError: The rate or the size is not positive.
    """
    if size <= 0:
        raise ValueError(f"size must be positive, got {size}")
    moments = poisson(rate_per_s / size, -(-count // size), seed=seed)
    return [moment for moment in moments for _ in range(size)][:count]


def ramp(rate_per_s: float, to_rate_per_s: float, count: int, *, seed: int) -> list[float]:
    """``count`` customers whose rate goes from one value to another, in equal steps over them.

    Raises:
        ValueError: A rate is not positive.
    """
    if min(rate_per_s, to_rate_per_s) <= 0:
        raise ValueError(f"rates must be positive, got {rate_per_s} and {to_rate_per_s}")
    draw = random.Random(seed)
    offsets, now = [], 0.0
    for number in range(count):
        offsets.append(now)
        share = number / max(1, count - 1)
        now += draw.expovariate(rate_per_s + share * (to_rate_per_s - rate_per_s))
    return offsets
