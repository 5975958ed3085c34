"""Draws one token for each request of a step."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from epdserve.kernels.sampling import sample
from epdserve.model.backbone import Backbone
from epdserve.services.decode.task import DecodeTask

_Columns: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Sampler:
    """Head and draws for a batch. Owned by the step loop.

    A draw depends on the request's seed and the token's position only, so a resumed or re-batched request draws the
    same. Parameters become tensors when the batch changes, not every step.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._batch: list[DecodeTask] = []
        self._params: _Columns | None = None
        self._any_minimum = False

    @torch.inference_mode()
    def draw(self, tasks: Sequence[DecodeTask], exit_RD: torch.Tensor) -> list[int]:
        """The next token of each task.

        Args:
            tasks: Requests, in the order of ``exit_RD``.
            exit_RD: (R, hidden) float32 exit vectors of their last rows.
        """
        if self._params is None or self._batch != list(tasks):
            self._params = self._remember(tasks)
        logits_RV = self._backbone.logits(exit_RD)
        if self._any_minimum:
            self._forbid_early_stops(tasks, logits_RV)
        positions = torch.tensor([task.request.length for task in tasks], device=logits_RV.device)
        drawn: list[int] = sample(logits_RV, *self._params, positions).tolist()
        return drawn

    def _remember(self, tasks: Sequence[DecodeTask]) -> _Columns:
        params = [task.sampling for task in tasks]
        device = self._backbone.device

        def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        self._batch = list(tasks)
        self._any_minimum = any(p.min_tokens for p in params)
        return (
            column([p.temperature for p in params], torch.float64),
            column([p.top_k for p in params], torch.int64),
            column([p.top_p for p in params], torch.float64),
            column([p.min_p for p in params], torch.float64),
            column([p.seed for p in params], torch.int64),
        )

    def _forbid_early_stops(self, tasks: Sequence[DecodeTask], logits_RV: torch.Tensor) -> None:
        for row, task in enumerate(tasks):
            if task.stop_ids and task.produced + 1 < task.sampling.min_tokens:
                stops = torch.tensor(sorted(task.stop_ids), device=logits_RV.device)
                logits_RV[row, stops[stops < logits_RV.shape[1]]] = -torch.inf
