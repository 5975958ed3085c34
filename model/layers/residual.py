"""Residual streams between two sub-blocks."""

from dataclasses import dataclass

import torch
from epdserve.kernels.mhc import expand


@dataclass(frozen=True, slots=True)
class Update:
    """Output of a sub-block (T, hidden) that is not yet spread over the streams, and how it will be."""

    out_TD: torch.Tensor
    post_Tn: torch.Tensor
    comb_Tnn: torch.Tensor


@dataclass(frozen=True, slots=True)
class Residual:
    """Residual streams (T, n, hidden) and the collapse coefficients (T, n) carried to the next sub-block.

    The last sub-block's update waits for the next one, which spreads it in the same pass over the streams in which it
    collapses them and predicts its coefficients.
    """

    streams_TnD: torch.Tensor
    carried_Tn: torch.Tensor
    update: Update | None = None

    def settled(self) -> "Residual":
        """The same with the update spread."""
        if self.update is None:
            return self
        update = self.update
        streams = expand(self.streams_TnD, update.out_TD, update.post_Tn, update.comb_Tnn)
        return Residual(streams, self.carried_Tn)

    def rows(self, rows_T: torch.Tensor) -> "Residual":
        """The same for a subset of the rows."""
        update = self.update
        if update is not None:
            update = Update(update.out_TD[rows_T], update.post_Tn[rows_T], update.comb_Tnn[rows_T])
        return Residual(self.streams_TnD[rows_T], self.carried_Tn[rows_T], update)
