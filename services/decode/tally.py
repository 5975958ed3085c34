"""Which tokens a request has seen, and how often: what penalties need, kept up by the token."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from epdserve.services.engine.requests import RunningRequest

_Ids: TypeAlias = npt.NDArray[np.int64]


class TokenTally:
    """Different tokens of one request and how often each occurs in its output. Owned by the step loop.

    It is a function of the request's tokens and follows them: after a preemption, and on the worker that takes a
    request over, it is the same.

    Args:
        prompt_tokens: Where the output begins.
        with_prompt: Tokens of the prompt count as seen, even if they do not occur in the output.
    """

    def __init__(self, request: RunningRequest, *, prompt_tokens: int, with_prompt: bool) -> None:
        self._request, self._read = request, prompt_tokens
        self._ids: _Ids = np.unique(request.tokens[: prompt_tokens if with_prompt else 0])
        self._counts: _Ids = np.zeros(len(self._ids), np.int64)
        self._used = len(self._ids)
        self._places: dict[int, int] = dict(zip(self._ids.tolist(), range(self._used), strict=True))

    def follow(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and counts, (N,) int64 each, as of the request's length now; good until the next call."""
        for token in self._request.tokens[self._read : self._request.length].tolist():
            place = self._place(token)  # may put longer arrays in place
            self._counts[place] += 1
        self._read = self._request.length
        return torch.from_numpy(self._ids[: self._used]), torch.from_numpy(self._counts[: self._used])

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, self._used)
        if place == self._used:
            if place == len(self._ids):
                self._ids, self._counts = _doubled(self._ids), _doubled(self._counts)
            self._ids[place] = token
            self._used += 1
        return place


def _doubled(array: _Ids) -> _Ids:
    return np.concatenate([array, np.zeros(max(64, len(array)), np.int64)])
