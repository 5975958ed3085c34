"""Draws one token for each request of a step, and tells log-probabilities."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from epdserve.kernels.sampling import sample, top_log_probs
from epdserve.model.backbone import Backbone
from epdserve.services.decode.adjusting import Adjustments
from epdserve.services.decode.grammar import Constraint, Words
from epdserve.services.decode.task import DecodeTask
from epdserve.services.sampling import TokenLogprob

_Columns: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Draws:
    """Tokens in the order of the requests, and by row what is told about them."""

    tokens: list[int]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)


class Sampler:
    """Head and draws for a batch. Owned by the step loop.

    A draw depends on the request's seed, the token's position and the request's own tokens only, so a resumed or
    re-batched request draws the same. Parameters become tensors when the batch changes, not every step.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._batch: list[DecodeTask] = []
        self._params: _Columns | None = None
        self._adjustments: Adjustments | None = None
        self._told: list[int] = []

    @torch.inference_mode()
    def draw(
        self,
        tasks: Sequence[DecodeTask],
        exit_RD: torch.Tensor,
        masks: Mapping[Constraint, Words] | None = None,
    ) -> Draws:
        """The next token of each task.

        Args:
            tasks: Requests, in the order of ``exit_RD``.
            exit_RD: (R, hidden) float32 exit vectors of their last rows.
            masks: Of the constraints that are active.
        """
        if self._params is None or self._batch != list(tasks):
            self._params = self._remember(tasks)
        logits_RV = self._backbone.logits(exit_RD)
        adjusted_RV = logits_RV
        if self._adjustments is not None:
            adjusted_RV = self._adjustments.apply(logits_RV, masks or {})
        positions = torch.tensor([task.request.length for task in tasks], device=logits_RV.device)
        token_R = sample(adjusted_RV, *self._params, positions)
        tokens: list[int] = token_R.tolist()
        return Draws(tokens, self._logprobs(logits_RV, token_R) if self._told else {})

    def _remember(self, tasks: Sequence[DecodeTask]) -> _Columns:
        params = [task.sampling for task in tasks]
        device = self._backbone.device

        def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        self._batch = list(tasks)
        self._told = [row for row, p in enumerate(params) if p.logprobs is not None]
        adjustments = Adjustments(
            tasks, vocab_size=self._backbone.config.text.vocab_size, device=self._backbone.device
        )
        self._adjustments = None if adjustments.none else adjustments
        return (
            column([p.temperature for p in params], torch.float64),
            column([p.top_k for p in params], torch.int64),
            column([p.top_p for p in params], torch.float64),
            column([p.min_p for p in params], torch.float64),
            column([p.seed for p in params], torch.int64),
        )

    def _logprobs(self, logits_RV: torch.Tensor, token_R: torch.Tensor) -> dict[int, TokenLogprob]:
        """What the model thinks of the tokens, whatever was done to the logits before the draw."""
        wanted = [self._batch[row].sampling.logprobs or 0 for row in self._told]
        rows = torch.tensor(self._told, device=logits_RV.device)
        most = min(max(wanted), logits_RV.shape[1])
        of_token, ids, values = top_log_probs(logits_RV[rows], token_R[rows], top=most)
        listed = zip(self._told, wanted, of_token.tolist(), ids.tolist(), values.tolist(), strict=True)
        return {
            row: TokenLogprob(logprob, tuple(zip(top[:count], told[:count], strict=True)))
            for row, count, logprob, top, told in listed
        }
