"""Log-probabilities of prompts as answers carry them: vLLM's form, one entry a token, null for the first."""

from __future__ import annotations

from typing import Any

from epdserve.services.router.vocabulary import Vocabulary, finite
from epdserve.services.sampling import PromptLogprobs
from epdserve.services.types import TokenIds


class PromptTold:
    """Collects what prefills tell of a request's prompts, in the order of the prompts."""

    def __init__(self, prompts: list[TokenIds], vocabulary: Vocabulary) -> None:
        self._prompts = prompts
        self._vocabulary = vocabulary
        self._told: dict[int, PromptLogprobs] = {}

    def take(self, prompt: int, told: PromptLogprobs | None) -> None:
        """Keep what was told of one prompt."""
        if told is not None:
            self._told[prompt] = told

    def raw(self, prompt: int) -> PromptLogprobs | None:
        """What was told of one prompt."""
        return self._told.get(prompt)

    def of(self, prompt: int) -> list[dict[str, Any] | None] | None:
        """vLLM's list of one prompt: ``{"ID": {logprob, rank, decoded_token}}`` of the token and its alternatives."""
        told = self._told.get(prompt)
        if told is None:
            return None
        entries: list[dict[str, Any] | None] = [None]
        rows = zip(
            self._prompts[prompt].tolist()[1:],
            told.logprobs.tolist(),
            told.top_ids.tolist(),
            told.top_logprobs.tolist(),
            strict=True,
        )
        for token, logprob, ids, logprobs in rows:
            ranked: dict[int, tuple[int | None, float]] = {
                other: (rank, one) for rank, (other, one) in enumerate(zip(ids, logprobs, strict=True), 1)
            }
            ranked.setdefault(token, (None, logprob))
            entries.append(
                {str(other): self._entry(other, rank, one) for other, (rank, one) in ranked.items()}
            )
        return entries

    def _entry(self, token: int, rank: int | None, logprob: float) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": self._vocabulary.name_of(token)}
