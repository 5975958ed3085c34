"""What the requests of a batch want done to their logits: penalties, biases, masks, tokens that may not come yet.

A batch in which nobody asks for anything costs one comparison a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from epdserve.kernels.sampling import add_bias, forbid, penalize
from epdserve.services.decode.grammar import Constraint, Words
from epdserve.services.decode.tally import TokenTally
from epdserve.services.decode.task import DecodeTask

_NOTHING_LEFT = float("-inf")


class Adjustments:
    """Of one batch; made when the batch changes. Owned by the step loop."""

    def __init__(self, tasks: Sequence[DecodeTask], *, vocab_size: int, device: torch.device) -> None:
        self._tasks, self._vocab_size, self._device = list(tasks), vocab_size, device
        self._penalized = [row for row, task in enumerate(tasks) if task.sampling.penalised]
        self._later = [
            row for row, task in enumerate(tasks) if task.sampling.min_tokens or task.constraint is not None
        ]
        self._biases = self._bias_columns()
        self._penalties = self._penalty_columns()
        constrained = any(task.constraint is not None for task in tasks)
        self.none = not (self._penalized or self._later or self._biases or constrained)

    def apply(self, logits_RV: torch.Tensor, masks: Mapping[Constraint, Words]) -> torch.Tensor:
        """Adjusted logits; rows of requests that ask for nothing keep their bits.

        A grammar is kept to whatever else was asked for: where biases and tokens that may not come yet leave nothing of
        what it allows, they are left out.
        """
        adjusted_RV = logits_RV
        if self._penalized:
            adjusted_RV = penalize(adjusted_RV, *self._seen(), *self._penalties)
        if self._biases:
            adjusted_RV = add_bias(adjusted_RV, *self._biases)
        rows_M, words_MB = self._masks(masks)
        if len(rows_M):
            adjusted_RV = forbid(adjusted_RV, rows_M, words_MB)
        adjusted_RV = self._without_early(adjusted_RV)
        suspects = sorted({*self._later, *self._biased_rows})
        if suspects:
            rows = torch.tensor(suspects, device=self._device)
            empty = rows[adjusted_RV[rows].amax(1) == _NOTHING_LEFT]
            if len(empty):
                masked_RV = forbid(logits_RV, rows_M, words_MB) if len(rows_M) else logits_RV
                adjusted_RV = adjusted_RV.index_copy(0, empty, masked_RV[empty])
        return adjusted_RV

    def _bias_columns(self) -> tuple[torch.Tensor, ...]:
        entries = [
            (row, token, bias)
            for row, task in enumerate(self._tasks)
            for token, bias in task.sampling.logit_bias
            if token < self._vocab_size
        ]
        self._biased_rows = sorted({row for row, _, _ in entries})
        if not entries:
            return ()
        rows, tokens, biases = zip(*entries, strict=True)
        return (
            torch.tensor(rows, device=self._device),
            torch.tensor(tokens, device=self._device),
            torch.tensor(biases, dtype=torch.float32, device=self._device),
        )

    def _penalty_columns(self) -> tuple[torch.Tensor, ...]:
        params = [task.sampling for task in self._tasks]
        return tuple(
            torch.tensor(values, dtype=torch.float32, device=self._device)
            for values in (
                [p.presence_penalty for p in params],
                [p.frequency_penalty for p in params],
                [p.repetition_penalty for p in params],
            )
        )

    def _seen(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, tokens and counts of what the penalized requests have seen, (N,) int64 each."""
        ids, counts = zip(*(_tally(self._tasks[row]).follow() for row in self._penalized), strict=True)
        sizes = torch.tensor([len(part) for part in ids])
        rows = torch.tensor(self._penalized).repeat_interleave(sizes)
        return rows.to(self._device), torch.cat(ids).to(self._device), torch.cat(counts).to(self._device)

    def _masks(self, masks: Mapping[Constraint, Words]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows (M,) that have a mask, and the masks (M, words)."""
        found = [
            (row, masks[task.constraint])
            for row, task in enumerate(self._tasks)
            if task.constraint is not None and task.constraint in masks
        ]
        words = -(-self._vocab_size // 32)
        if not found:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, words, dtype=torch.int32)
        stacked = np.stack([mask[:words] for _, mask in found])
        rows = torch.tensor([row for row, _ in found], device=self._device)
        return rows, torch.from_numpy(stacked).to(self._device)

    def _without_early(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Without the ends that come too soon, and without what may not come before the constrained part."""
        rows: list[int] = []
        tokens: list[int] = []
        for row in self._later:
            task = self._tasks[row]
            early = task.stop_ids if task.produced + 1 < task.sampling.min_tokens else frozenset()
            held = task.constraint.forbidden if task.constraint is not None else ()
            chosen = [token for token in early.union(held) if token < self._vocab_size]
            rows += [row] * len(chosen)
            tokens += chosen
        if not rows:
            return logits_RV
        index = (torch.tensor(rows, device=self._device), torch.tensor(tokens, device=self._device))
        return logits_RV.index_put(index, logits_RV.new_tensor(_NOTHING_LEFT))


def _tally(task: DecodeTask) -> TokenTally:
    if task.tally is None:
        task.tally = TokenTally(
            task.request,
            prompt_tokens=len(task.job.tokens),
            with_prompt=task.sampling.repetition_penalty != 1.0,
        )
    return task.tally
