"""Batches laid out while a device runs the step before: the same bits, and thrown away when something else came."""

import pytest
import torch
from epdserve.model.batch import Outputs
from epdserve.model.errors import ForwardStopped
from epdserve.model.replay import PrefillSpan
from epdserve.services.engine.onboard import onboard
from epdserve.services.engine.requests import RunningRequest, TokenArray
from epdserve.services.engine.runner import Part, Runner
from support.engine import TENANT, PrefillBench, make_runner, prompt

LONG, SHORT = prompt(61), prompt(21, 1)


def bench(*, ahead: bool, **changes: object) -> PrefillBench:
    """As on a device if ``ahead``: this host has none to wait for."""
    made = PrefillBench(chunk_tokens=9, **changes)
    made.runner.ahead.useful = ahead
    return made


def state(made: PrefillBench, *, deterministic: bool = False, late: bool = False) -> list[torch.Tensor]:
    """Bytes of all pages and tails after two prompts, the second from the beginning or later."""
    tasks = [made.submit(LONG, deterministic=deterministic)]
    if late:
        assert made.worker.step()
        assert made.worker.step()
    tasks.append(made.submit(SHORT, deterministic=deterministic))
    while made.worker.step():
        pass
    results = [task.done.result(timeout=0) for task in tasks]
    pages = [made.runner.pools.pages[block.page] for result in results for block in result.handle.blocks]
    return [*pages, *(made.runner.staging[result.handle.tail.slot] for result in results)]


@pytest.mark.parametrize("late", [False, True], ids=["together", "one later"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["usual", "deterministic"])
def test_the_same_bytes_as_without(deterministic: bool, late: bool) -> None:
    ours, plain = (bench(ahead=ahead, deterministic_cut_tokens=24) for ahead in (True, False))
    found, expected = (state(made, deterministic=deterministic, late=late) for made in (ours, plain))
    assert len(found) == len(expected) > 4
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert ours.runner.ahead.met >= 4
    assert ours.runner.ahead.met == ours.runner.ahead.foreseen - late  # the newcomer was not foreseen
    assert plain.runner.ahead.foreseen == 0


def started(runner: Runner, tokens: TokenArray) -> RunningRequest:
    """A request that has its place."""
    nothing = PrefillSpan(first_row=0, publish_from=0, encoder_floor=0, decoder_from=0, decoder_floor=0)
    request = RunningRequest("r", tokens, len(tokens), len(tokens), TENANT, False, nothing)
    assert onboard(runner, request)
    return request


def test_a_page_that_gave_way_to_its_double_is_looked_up_again() -> None:
    """Both prompts fill the same first block; the second's page is given back as the first's is sealed."""
    runner = make_runner()
    runner.ahead.useful = True
    first, second = (started(runner, prompt(30)) for _ in range(2))
    both = [first, second]
    runner.run([Part(r, 20, Outputs.NONE) for r in both], then=lambda: [Part(r, 10) for r in both])
    exits = runner.run([Part(r, 10) for r in both])
    assert first.pages[:2] == second.pages[:2]
    assert (runner.ahead.foreseen, runner.ahead.met) == (1, 0)
    assert torch.equal(exits[0], exits[1])
    for request in both:
        runner.release(request)
    assert runner.leaked_pages() == 0


class _NoGraph:
    """Fails if a graph is run."""

    def forward(self, segments: object) -> torch.Tensor:
        raise AssertionError("a graph cannot be stopped")


def test_a_step_that_nobody_wants_runs_no_graph() -> None:
    runner = make_runner()
    runner.graphs = _NoGraph()  # type: ignore[assignment]
    request = started(runner, prompt(20))
    with pytest.raises(ForwardStopped):
        runner.run([Part(request, 20)], unwanted=lambda: True)
    assert request.next_row == 0
    runner.release(request)
