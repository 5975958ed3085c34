"""What a decode worker draws from: logits of every draw, by request."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from epdserve.services.decode.grammar import Constraint, Words
from epdserve.services.decode.sampler import Draws
from epdserve.services.decode.task import DecodeTask
from support.engine import DecodeBench


def logits_of(bench: DecodeBench) -> dict[str, list[torch.Tensor]]:
    """Logits of every draw from now on, in order, by request id."""
    seen: dict[str, list[torch.Tensor]] = defaultdict(list)
    sampler = bench.worker._sampler
    draw = sampler.draw

    def spy(
        tasks: Sequence[DecodeTask], exit_RD: torch.Tensor, masks: Mapping[Constraint, Words] | None = None
    ) -> Draws:
        for task, logits in zip(tasks, bench.runner.backbone.logits(exit_RD), strict=True):
            seen[task.request.request_id].append(logits)
        return draw(tasks, exit_RD, masks)

    sampler.draw = spy  # type: ignore[method-assign]
    return seen
