import pytest
from epdserve.loadtest.arrivals import at_once, bursts, poisson, ramp


def test_same_seed_gives_same_arrivals() -> None:
    assert poisson(5.0, 20, seed=3) == poisson(5.0, 20, seed=3)
    assert poisson(5.0, 20, seed=3) != poisson(5.0, 20, seed=4)


def test_first_customer_comes_at_once_and_the_others_later() -> None:
    offsets = poisson(5.0, 50, seed=1)
    assert offsets[0] == 0.0
    assert offsets == sorted(offsets)


def test_mean_rate_is_the_asked_one() -> None:
    offsets = poisson(10.0, 4000, seed=1)
    assert (len(offsets) - 1) / offsets[-1] == pytest.approx(10.0, rel=0.05)


@pytest.mark.parametrize("rate_per_s", [0.0, -1.0])
def test_rate_must_be_positive(rate_per_s: float) -> None:
    with pytest.raises(ValueError, match="rate_per_s"):
        poisson(rate_per_s, 3, seed=1)


def test_at_once_means_no_delay() -> None:
    assert at_once(3) == [0.0, 0.0, 0.0]


def test_bursts_come_together_at_the_mean_rate() -> None:
    offsets = bursts(10.0, 4000, size=8, seed=1)
    assert len(offsets) == 4000
    assert len(set(offsets)) == 500
    assert len(offsets) / offsets[-1] == pytest.approx(10.0, rel=0.15)
    with pytest.raises(ValueError, match="size"):
        bursts(1.0, 3, size=0, seed=1)


def test_a_ramp_gets_faster() -> None:
    offsets = ramp(1.0, 9.0, 2000, seed=1)
    early, late = offsets[500] - offsets[0], offsets[1999] - offsets[1499]
    assert early / late > 3
    with pytest.raises(ValueError, match="positive"):
        ramp(1.0, 0.0, 3, seed=1)
