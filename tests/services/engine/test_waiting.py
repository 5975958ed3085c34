"""What waits for a place: order, passing, and no starving."""

from epdserve.services.engine.waiting import WaitingQueue
from support.engine import PrefillBench, prompt


def filled(*names: str, max_overtakes: int = 2) -> WaitingQueue[str]:
    queue = WaitingQueue[str](max_overtakes=max_overtakes)
    for name in names:
        queue.append(name)
    return queue


def start(queue: WaitingQueue[str], fits: str = "", *, not_ready: str = "") -> list[str]:
    return queue.start(ready=lambda name: name not in not_ready, try_start=lambda name: name in fits)


def test_all_start_in_order_of_arrival() -> None:
    queue = filled("a", "b", "c")
    assert start(queue, "abc") == ["a", "b", "c"]
    assert len(queue) == 0
    assert queue.oldest() is None


def test_small_ones_pass_a_big_one_so_often_and_no_more() -> None:
    queue = filled("big", "a", "b", "c")
    assert start(queue, "abc") == ["a", "b"]
    queue.append("d")
    assert start(queue, "abcd") == []
    assert queue.oldest() == "big"
    assert start(queue, ["big", "c", "d"]) == ["big", "c", "d"]  # type: ignore[arg-type]


def test_what_is_not_ready_is_passed_freely() -> None:
    queue = filled("slow", "a", "b", "c")
    assert start(queue, "abc", not_ready="slow") == ["a", "b", "c"]
    queue.append("d")
    assert start(queue, ["slow", "d"]) == ["slow", "d"]  # type: ignore[arg-type]


def test_nothing_is_passed_where_none_may_be() -> None:
    assert start(filled("big", "a", max_overtakes=0), "a") == []


def test_one_step_tries_only_so_many() -> None:
    queue = filled(*(f"n{number}" for number in range(40)), max_overtakes=100)
    tried: list[str] = []
    queue.start(ready=lambda _: True, try_start=lambda name: bool(tried.append(name)))
    assert tried == [f"n{number}" for number in range(16)]


def test_leaving_the_queue_forgets_what_was_passed() -> None:
    queue = filled("big", "a")
    assert start(queue, "a") == ["a"]
    queue.remove("big")
    assert list(queue) == []
    queue.append("big")
    queue.append("b")
    queue.append("c")
    assert start(queue, "bc") == ["b", "c"]


def test_a_prompt_that_does_not_fit_holds_up_small_ones_only_so_long_as_it_must() -> None:
    bench = PrefillBench(num_pages=16, max_overtakes=3)
    holder = bench.run(prompt(60))  # eight pages under a lease
    big = bench.submit(prompt(120, 1))
    bench.clock.advance(9.0)  # until its patience is over, what is short goes first anyway
    small = [bench.submit(prompt(10, 2 + n)) for n in range(5)]
    while bench.worker.step():
        pass
    assert [task.done.done() for task in small] == [True, True, True, False, False]
    assert not big.done.done()
    bench.end_leases()
    while bench.worker.step():
        bench.end_leases()
    assert big.done.done()
    assert all(task.done.done() for task in small)
    assert holder.computed_tokens == 60
    bench.end_leases()
    bench.assert_nothing_leaked()


def test_the_most_urgent_starts_first_unless_somebody_was_passed_too_often() -> None:
    queue = filled("b", "c", "a")
    start_one = {"ready": lambda _: True, "try_start": lambda name: name == "a" or len(queue) < 3}
    assert queue.start(order=lambda name: name, **start_one) == ["a", "b", "c"]  # type: ignore[arg-type]
    queue = filled("z", "a", "b")
    assert queue.start(
        ready=bool, try_start=lambda name: name != "z", order=lambda name: (name != "z", name)
    ) == [
        "a",
        "b",
    ]
    queue.append("c")
    tried: list[str] = []
    queue.start(ready=bool, try_start=lambda name: bool(tried.append(name)), order=lambda name: name)
    assert tried == ["z"]
