"""Random requests, cancellations and faults on few pages: tokens stay right, and nothing is left behind."""

import random

import pytest
from epdserve.services.types import DecodeJob
from support.engine import DecodeBench, PrefillBench, greedy, greedy_reference, prompt

LENGTHS = (3, 9, 14, 25)
NEW_TOKENS = 7
ACTIONS = (
    "submit",
    "submit",
    "submit alone",
    "cancel",
    "cut lease",
    "tear",
    "hold",
    "resume",
    "step",
    "step",
    "step",
)


@pytest.mark.parametrize("seed", range(4))
def test_random_lives_leave_nothing_behind(seed: int) -> None:
    draw = random.Random(seed)
    bench = DecodeBench(
        PrefillBench(block_tokens=4),
        block_tokens=4,
        num_pages=20,
        max_running=4,
        handoff_deadline_s=0.1,
        swap_memory_bytes=draw.choice((0, 40_000, 2**24)),
    )
    jobs: dict[str, DecodeJob] = {}
    cancelled: set[str] = set()
    for _ in range(40):
        action = draw.choice(ACTIONS)
        if action.startswith("submit") and len(jobs) < 10:
            # exact: what is drawn then depends on nothing that happened before
            tokens, alone = prompt(draw.choice(LENGTHS)), action.endswith("alone")
            job = bench.job(tokens, greedy(NEW_TOKENS), exact=True, **({"handle": None} if alone else {}))
            jobs[job.request_id] = job
            bench.worker.enqueue(bench.worker.new_task(job))
        elif action == "cancel" and jobs:
            request_id = draw.choice(sorted(jobs))
            cancelled.add(request_id)
            bench.worker.cancel(request_id)
        elif action == "cut lease":
            bench.leases.end_all()
        elif action == "tear":
            bench.prefill.runner.staging[draw.randrange(16), 3] ^= 1
        elif action == "hold":
            bench.fabric.hold("prefill-0")
        elif action == "resume":
            bench.fabric.resume("prefill-0")
        else:
            steps = iter(range(draw.randrange(1, 4)))
            bench.pump(until=lambda steps=steps: next(steps, None) is None)  # type: ignore[misc]
        bench.runner.blocks.check()
    bench.fabric.resume("prefill-0")
    bench.pump()
    for request_id, job in jobs.items():
        if bench.chunks.get(request_id) and bench.chunks[request_id][-1].final:
            assert bench.output(request_id) == greedy_reference(job.tokens, NEW_TOKENS, exact=True)
        else:
            assert request_id in cancelled
    bench.prefill.end_leases()
    bench.close()
