from epdserve.services.decode.batcher import Claim, Holder, StepPlan, plan_step
from hypothesis import given
from hypothesis import strategies as st


def test_requests_start_in_order_of_arrival_while_pages_and_slots_last() -> None:
    waiting = [Claim(arrival, 3) for arrival in range(5)]
    assert plan_step([], [], waiting, free_pages=100, free_slots=3).admit == 3
    assert (
        plan_step([], [], waiting, free_pages=9, free_slots=5).admit == 2
    )  # 3 + 3, watermark of 2 beside the second


def test_watermark_keeps_a_page_for_every_running_request() -> None:
    running = [Holder(0, 4, 0), Holder(1, 4, 0)]
    assert plan_step(running, [], [Claim(2, 3)], free_pages=5, free_slots=1).admit == 0
    assert plan_step(running, [], [Claim(2, 3)], free_pages=6, free_slots=1).admit == 1


def test_only_request_may_use_the_last_page() -> None:
    assert plan_step([], [], [Claim(0, 8)], free_pages=8, free_slots=1).admit == 1
    assert plan_step([], [], [Claim(0, 8)], free_pages=8, free_slots=1, others_hold_pages=True).admit == 0


def test_long_request_at_the_head_is_not_passed() -> None:
    assert (
        plan_step([Holder(0, 1, 0)], [], [Claim(1, 50), Claim(2, 1)], free_pages=20, free_slots=5).admit == 0
    )


def test_youngest_is_preempted_when_pages_run_out() -> None:
    running = [Holder(7, 5, 1), Holder(3, 5, 1), Holder(5, 5, 0)]
    assert plan_step(running, [], [], free_pages=1, free_slots=0) == StepPlan(preempt=(7,))


def test_who_is_worth_least_goes_out_first_but_never_the_oldest() -> None:
    running = [Holder(0, 5, 1, (-9, 0.0)), Holder(1, 5, 1, (0, -50.0)), Holder(2, 5, 1, (0, -3.0))]
    assert plan_step(running, [], [], free_pages=2, free_slots=0).preempt == (1,)
    assert plan_step([*running, Holder(3, 1, 1, (-1, 0.0))], [], [], free_pages=1, free_slots=0).preempt == (
        3,
        1,
    )


def test_oldest_is_never_preempted_and_stalls_when_alone() -> None:
    assert plan_step([Holder(0, 5, 1)], [], [], free_pages=0, free_slots=0) == StepPlan(stalled=(0,))


def test_nothing_comes_in_while_something_goes_out() -> None:
    running = [Holder(0, 2, 1), Holder(1, 2, 1)]
    plan = plan_step(running, [Claim(2, 1)], [Claim(3, 1)], free_pages=1, free_slots=4)
    assert plan == StepPlan(preempt=(1,))


def test_preempted_requests_come_back_oldest_first_before_new_ones() -> None:
    preempted = [Claim(4, 2), Claim(2, 2)]
    assert plan_step([], preempted, [Claim(9, 1)], free_pages=20, free_slots=2) == StepPlan(resume=(2, 4))
    assert plan_step([], preempted, [Claim(9, 1)], free_pages=20, free_slots=3) == StepPlan(
        resume=(2, 4), admit=1
    )
    assert plan_step([], preempted, [Claim(9, 1)], free_pages=3, free_slots=3) == StepPlan(resume=(2,))


pages = st.integers(0, 9)


@given(
    st.lists(st.tuples(pages, st.integers(0, 2)), max_size=6),
    st.lists(pages, max_size=4),
    st.lists(pages, max_size=4),
    st.integers(0, 30),
    st.integers(0, 6),
)
def test_plan_never_promises_pages_that_are_not_there(
    held: list[tuple[int, int]], preempted: list[int], waiting: list[int], free_pages: int, free_slots: int
) -> None:
    running = [Holder(i, *pair) for i, pair in enumerate(held)]
    claims = [Claim(10 + i, need) for i, need in enumerate(preempted + waiting)]
    out, new = claims[: len(preempted)], claims[len(preempted) :]
    plan = plan_step(running, out, new, free_pages=free_pages, free_slots=free_slots)
    kept = [h for h in running if h.arrival not in plan.preempt]
    runs = [h for h in kept if h.arrival not in plan.stalled]
    budget = free_pages + sum(h.pages for h in running if h.arrival in plan.preempt)
    brought = [c for c in out if c.arrival in plan.resume] + list(new[: plan.admit])
    assert sum(h.growth for h in runs) + sum(c.pages for c in brought) <= budget
    assert len(brought) <= free_slots
    assert not (plan.preempt and brought)
    assert not running or 0 not in plan.preempt
