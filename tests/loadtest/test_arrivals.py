import pytest
from epdserve.loadtest.arrivals import at_once, poisson


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
