import threading
from collections.abc import Iterator

import pytest
from epdserve.services.engine.step_loop import StepLoop
from epdserve.services.errors import Internal, Overloaded, Unavailable
from support.manual_clock import ManualClock


class Work:
    """Counts steps; does as many in a row as it is told."""

    def __init__(self) -> None:
        self.steps = 0
        self.left = 0
        self.stepped = threading.Semaphore(0)

    def step(self) -> bool:
        self.steps += 1
        self.stepped.release()
        if self.left < 0:
            raise RuntimeError("broken")
        self.left = max(0, self.left - 1)
        return self.left > 0


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def loop(work: Work) -> Iterator[StepLoop]:
    loop = StepLoop("test-steps", work.step, clock=ManualClock(), tick_s=30.0)
    loop.start()
    yield loop
    loop.stop(timeout_s=5.0)


def test_steps_follow_one_another_while_there_is_work(loop: StepLoop, work: Work) -> None:
    def give_work() -> None:
        work.left = 5

    loop.submit(give_work)
    for _ in range(5):
        assert work.stepped.acquire(timeout=5)
    loop.call(lambda: None).result(5)
    assert work.steps in (5, 6)  # and one more may have followed the last command


def test_idle_loop_sleeps_until_woken(loop: StepLoop, work: Work) -> None:
    loop.call(lambda: None).result(5)
    work.stepped.acquire(timeout=5)
    assert not work.stepped.acquire(timeout=0.05)
    loop.wake()
    assert work.stepped.acquire(timeout=5)


def test_commands_run_in_order_and_results_come_back(loop: StepLoop) -> None:
    seen: list[int] = []
    for n in range(10):
        loop.submit(lambda n=n: seen.append(n))  # type: ignore[misc]
    assert loop.call(lambda: list(seen)).result(5) == list(range(10))


def test_error_of_a_call_belongs_to_its_caller(loop: StepLoop) -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        loop.call(fail).result(5)
    assert loop.call(lambda: 1).result(5) == 1


def test_command_queue_is_bounded() -> None:
    loop = StepLoop("unstarted", lambda: False, clock=ManualClock(), max_commands=2)
    loop.submit(lambda: None)
    loop.submit(lambda: None)
    with pytest.raises(Overloaded):
        loop.submit(lambda: None)
    assert loop.queued_commands == 2


def test_age_of_the_running_step_is_told() -> None:
    clock, entered, leave = ManualClock(), threading.Event(), threading.Event()

    def step() -> bool:
        entered.set()
        leave.wait(5)
        return False

    loop = StepLoop("slow", step, clock=clock, tick_s=30.0)
    assert loop.step_age_s == 0.0
    loop.start()
    loop.wake()
    assert entered.wait(5)
    clock.advance(3.0)
    assert loop.step_age_s == 3.0
    with pytest.raises(TimeoutError):
        loop.stop(timeout_s=0.01)
    leave.set()
    loop.stop(timeout_s=5.0)
    assert loop.step_age_s == 0.0


def test_stopped_loop_runs_what_was_queued_and_takes_no_more(work: Work) -> None:
    loop = StepLoop("stopping", work.step, clock=ManualClock(), tick_s=30.0)
    ran: list[int] = []
    loop.submit(lambda: ran.append(1))
    loop.start()
    loop.stop(timeout_s=5.0)
    assert ran == [1]
    with pytest.raises(Unavailable):
        loop.submit(lambda: None)
    assert not loop.running


def test_crash_ends_the_loop_and_tells_everybody(work: Work, caplog: pytest.LogCaptureFixture) -> None:
    crashed: list[BaseException] = []
    clock = ManualClock()
    loop = StepLoop("broken", work.step, clock=clock, on_crash=crashed.append, tick_s=30.0)
    blocked = threading.Event()

    def break_it() -> None:
        blocked.wait(5)
        work.left = -1

    loop.start()
    first = loop.call(break_it)
    blocked.set()
    first.result(5)
    loop._thread.join(5)
    assert isinstance(crashed[0], RuntimeError)
    clock.advance(2.0)
    assert loop.step_age_s == 2.0  # the heartbeat shows a step that never ends
    with pytest.raises(Unavailable):
        loop.submit(lambda: None)


def test_commands_behind_a_crash_are_told() -> None:
    loop = StepLoop("broken", lambda: False, clock=ManualClock(), tick_s=30.0)

    def crash() -> None:
        raise RuntimeError("a command must not raise")

    lost: list[BaseException] = []
    loop.submit(crash)
    loop.submit(lambda: None, lost.append)
    future = loop.call(lambda: 1)
    loop.start()
    with pytest.raises(Internal):
        future.result(5)
    assert isinstance(lost[0], Internal)
