"""How many requests a second of a workload a cluster can serve at all: the rate that loads are given in shares of."""

from __future__ import annotations

from collections.abc import Sequence

from epdserve.loadtest.simulator.cluster import ClusterSpec
from epdserve.loadtest.simulator.hardware import WINDOW
from epdserve.loadtest.simulator.requests import BLOCK_TOKENS, INTERACTIVE, Request
from epdserve.loadtest.simulator.workloads import Workload


def capacity(spec: ClusterSpec, workload: Workload) -> float:
    """Requests a second at which prefill workers are busy all the time or decode steps take the strictest target.

    Every prefix that came before counts as cached.
    """
    requests = workload.requests
    seen = {block for chain in workload.warm for block in chain}
    computed = 0.0
    for request in requests:
        length = 0
        for block in request.blocks:
            if block not in seen:
                break
            length += 1
        hit = length * BLOCK_TOKENS
        left = request.prompt_tokens - (hit - WINDOW if hit > WINDOW else 0)
        computed += spec.timing.prefill_s(max(1, left), request.prompt_tokens)
        seen.update(request.answer_blocks or request.blocks)
    prefill_rate = spec.prefills * len(requests) / computed
    return min(prefill_rate, _decode_rate(spec, requests))


def _decode_rate(spec: ClusterSpec, requests: Sequence[Request]) -> float:
    context = sum(one.prompt_tokens for one in requests) / len(requests)
    output = sum(one.output_tokens for one in requests) / len(requests)
    running = 1
    while running < 4096 and spec.timing.decode_s(running + 1, (running + 1) * context) < INTERACTIVE.tpot_s:
        running += 1
    return spec.decodes * running / (output * INTERACTIVE.tpot_s)
