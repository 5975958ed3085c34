"""How well answers are predicted, by task: every batch is new, so a step's own forward is a held-out measurement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from epdserve.model.demo.training.facts import TASKS
from torch import Tensor


class Scores:
    """Running sums since the last report."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start anew."""
        self.loss: dict[str, float] = defaultdict(float)
        self.tokens: dict[str, int] = defaultdict(int)
        self.answers: dict[str, int] = defaultdict(int)
        self.right: dict[str, int] = defaultdict(int)
        self.notes: dict[str, list[float]] = defaultdict(list)

    def note(self, name: str, value: float) -> None:
        """Remember another number of the step."""
        self.notes[name].append(value)

    def add(self, rows: Tensor, tasks: Tensor, losses: Tensor, right: Tensor) -> None:
        """One step's answer tokens, in order; neighbouring rows of one task are one answer."""
        before: tuple[int, int] | None = None
        whole = True
        for row, task, loss, good in zip(
            rows.tolist(), tasks.tolist(), losses.tolist(), right.tolist(), strict=True
        ):
            if before != (row - 1, task):
                self._close(before, whole)
                whole = True
            name = TASKS[task]
            self.loss[name] += loss
            self.tokens[name] += 1
            whole = whole and good
            before = (row, task)
        self._close(before, whole)

    def _close(self, before: tuple[int, int] | None, whole: bool) -> None:
        if before is not None:
            self.answers[TASKS[before[1]]] += 1
            self.right[TASKS[before[1]]] += whole

    def reach(self, gate: Mapping[str, float]) -> bool:
        """Whether every task of a gate, which is not empty, has its share of right answers."""
        return bool(gate) and all(
            self.answers[name] and self.right[name] / self.answers[name] >= share
            for name, share in gate.items()
        )

    def line(self) -> str:
        """Cross-entropy of a token and share of wholly right answers, by task."""
        parts = [
            f"{name} {self.loss[name] / self.tokens[name]:.3f}/{self.right[name] / self.answers[name]:.2f}"
            for name in TASKS
            if self.answers[name]
        ]
        parts += [f"{name} {sum(values) / len(values):.3f}" for name, values in self.notes.items()]
        return "  ".join(parts)
