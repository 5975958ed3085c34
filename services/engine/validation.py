"""What a worker refuses before it touches any memory."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from epdserve.services.engine.config import EngineSettings
from epdserve.services.engine.runner import Runner
from epdserve.services.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds of what one request may ask for."""

    vocab_size: int
    max_context_tokens: int  # prompt and output together

    @classmethod
    def of(cls, runner: Runner, settings: EngineSettings) -> "RequestLimits":
        """What the pages hold if one request has them all, or less if the settings or the model say so."""
        text = runner.backbone.config.text
        limits = [runner.num_pages * runner.block_tokens, text.max_position_embeddings]
        if settings.max_context_tokens is not None:
            limits.append(settings.max_context_tokens)
        return cls(text.vocab_size, min(limits))

    def check(self, tokens: npt.NDArray[np.int64], tenant_key: bytes, *, max_new_tokens: int) -> None:
        """Refuse what cannot be run.

        Raises:
            InvalidRequest: With the field at fault.
        """
        if len(tokens) == 0:
            raise InvalidRequest("the prompt is empty", param="messages")
        if len(tokens) + max_new_tokens > self.max_context_tokens:
            asked = f"{len(tokens)} prompt tokens and {max_new_tokens} new ones"
            raise InvalidRequest(f"{asked} exceed the context of {self.max_context_tokens}", param="messages")
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
            raise InvalidRequest(f"token ids must lie in [0, {self.vocab_size})", param="messages")
        if not 1 <= len(tenant_key) <= 64:
            raise InvalidRequest(f"tenant key of {len(tenant_key)} bytes", param="tenant_key")
