from __future__ import annotations

from epdserve.loadtest.simulator.caches import Caches
from epdserve.loadtest.simulator.hardware import B200, H200, Timing

# Workers 0 and 1 on machine 0, worker 2 on machine 1; blocks of 512 tokens


def caches(*, pages: int = 100, host: int = 100) -> Caches:
    return Caches([0, 0, 1], 2, pages_tokens=pages * 512, host_tokens=host * 512)


def test_hits_are_told_by_tier_and_worker() -> None:
    some = caches()
    some.fill(0, [1, 2, 3])
    some.store(1, [1, 2])
    blocks = some.hits([1, 2, 3, 4]) / 512
    assert blocks.tolist() == [[3, 0, 0], [3, 3, 2], [3, 3, 2], [3, 3, 3]]
    for worker in range(3):
        assert some.hits_at(worker, [1, 2, 3, 4]) == (blocks[:, worker] * 512).tolist()


def test_a_chain_ends_at_its_first_gap() -> None:
    some = caches()
    some.fill(0, [1, 3])
    assert some.hits([1, 2, 3])[0].tolist() == [512, 0, 0]
    assert some.hits([2]).max() == 0


def test_what_is_used_least_lately_leaves_pages_and_host_but_not_the_ssd() -> None:
    some = caches(pages=2, host=2)
    some.fill(0, [1, 2])
    some.fill(0, [3, 4])
    assert (some.hits([1, 2])[:, 0] / 512).tolist() == [0, 0, 2, 2]
    assert (some.hits([3, 4])[:, 0] / 512).tolist() == [2, 2, 2, 2]


def test_a_chain_loses_its_end_first() -> None:
    some = caches(pages=2)
    some.fill(0, [1, 2, 3])
    assert some.hits([1, 2, 3])[0, 0] == 2 * 512


def test_steps_take_longer_with_more_work_and_less_on_a_faster_gpu() -> None:
    slow, fast = Timing(H200), Timing(B200)
    assert slow.decode_s(1, 1e3) < slow.decode_s(100, 1e6) < slow.decode_s(500, 5e6)
    assert fast.decode_s(100, 1e6) < slow.decode_s(100, 1e6)
    assert slow.prefill_s(8192, 8192) < slow.prefill_s(8192, 500_000)
    assert fast.prefill_tokens_per_s > 2 * slow.prefill_tokens_per_s
