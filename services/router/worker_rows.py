"""Numbers by worker in one array: every request asks for those of all workers, and there may be hundreds."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
from epdserve.services.policy.pools import Floats, Indices

_FIRST_ROWS = 16
# So many rows more than twice the workers that are alive are kept, before the others are forgotten
_SPARE = 8


class WorkerRows:
    """One row of numbers a worker. A name that is asked for gets a row of zeros.

    Attributes:
        values: (fields, rows), so that one number of all lies together; only the first ``len(self)`` rows are in use.
        layout: Goes up when rows have moved: who remembers their numbers must ask again.
    """

    def __init__(self, fields: int) -> None:
        self.values: Floats = np.zeros((fields, _FIRST_ROWS))
        self.layout = 0
        self._rows: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def row(self, name: str) -> int:
        """The number of a worker's row."""
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = len(self._rows)
            if row == self.values.shape[1]:
                self.values = np.concatenate((self.values, np.zeros_like(self.values)), axis=1)
        return row

    def of(self, name: str) -> Floats:
        """A worker's row itself, good until the next name comes."""
        row = self.row(name)  # first: a new one may need another array
        found: Floats = self.values[:, row]
        return found

    def rows(self, names: Iterable[str]) -> Indices:
        """The numbers of several."""
        return np.array([self.row(name) for name in names], dtype=np.int64)

    def column(self, field: int) -> Floats:
        """One number of all that have a row, in the order of rows."""
        used: Floats = self.values[field, : len(self._rows)]
        return used

    def keep(self, names: Collection[str]) -> None:
        """Forget who is not among these, once they have become many."""
        if len(self._rows) <= 2 * len(names) + _SPARE:
            return
        alive = set(names)
        kept = {name: row for name, row in self._rows.items() if name in alive}
        values = np.zeros((len(self.values), max(_FIRST_ROWS, len(kept))))
        values[:, : len(kept)] = self.values[:, list(kept.values())]
        self.values = values
        self._rows = {name: row for row, name in enumerate(kept)}
        self.layout += 1
