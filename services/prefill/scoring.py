"""Log-probabilities of a prompt's own tokens, from the rows of its prefill.

They are made where the rows are: the decode worker gets one exit vector, and would have to run the prompt again. Every
row runs in every layer, so such a prompt takes no hit and drops no row.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from epdserve.kernels.sampling import top_log_probs
from epdserve.model.backbone import Backbone
from epdserve.services.sampling import PromptLogprobs
from epdserve.services.types import TokenIds

_ROWS: Final = 32  # logits of so many rows at a time: half a megabyte each with the published vocabulary


class PromptScorer:
    """Collects the log-probabilities of one prompt. Owned by the step loop.

    Args:
        top: Alternatives told of each token.
    """

    def __init__(self, backbone: Backbone, tokens: TokenIds, top: int) -> None:
        self._backbone, self._top = backbone, min(top, backbone.config.text.vocab_size)
        self._tokens = torch.from_numpy(tokens.astype(np.int64))
        rows = len(tokens) - 1
        self._logprobs = np.empty(rows, np.float32)
        self._top_ids = np.empty((rows, self._top), np.int32)
        self._top_logprobs = np.empty((rows, self._top), np.float32)

    @torch.inference_mode()
    def take(self, first_row: int, exit_RD: torch.Tensor) -> None:
        """Exit vectors (R, hidden) of the rows from ``first_row`` on; each tells of the token after it."""
        for begin in range(0, min(len(exit_RD), len(self._logprobs) - first_row), _ROWS):
            row = first_row + begin
            part_RD = exit_RD[begin : begin + min(_ROWS, len(self._logprobs) - row)]
            next_R = self._tokens[row + 1 : row + 1 + len(part_RD)].to(part_RD.device)
            found = top_log_probs(self._backbone.logits(part_RD), next_R, top=self._top)
            for array, values in zip((self._logprobs, self._top_ids, self._top_logprobs), found, strict=True):
                array[row : row + len(part_RD)] = values.cpu().numpy()

    def result(self) -> PromptLogprobs:
        """All of them, once every row was taken."""
        return PromptLogprobs(self._logprobs, self._top_ids, self._top_logprobs)
