"""What a request took: where its tokens' KV came from, and what decoding cost. Frozen values, no behaviour."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final


@dataclass(frozen=True, slots=True)
class TokenSources:
    """Tokens of a prompt by where their KV came from.

    Attributes:
        device: Pages of the worker itself.
        tail: The open block of a tail.
        host, ssd, peer: Blocks that the machine's store lent, by where it had them.
        computed: The others.
    """

    device: int = 0
    tail: int = 0
    host: int = 0
    ssd: int = 0
    peer: int = 0
    computed: int = 0

    def by_name(self) -> Iterator[tuple[str, int]]:
        """Every source that gave tokens, and how many."""
        return ((name, count) for name in _SOURCES if (count := getattr(self, name)))

    @property
    def cached(self) -> int:
        """The hit length."""
        return self.device + self.tail + self.host + self.ssd + self.peer


_SOURCES: Final = tuple(item.name for item in fields(TokenSources))


@dataclass(frozen=True, slots=True)
class DecodeReceipt:
    """What decoding one request took; comes with its last chunk.

    Attributes:
        pulled_tokens: Tokens whose KV came over the transfer.
        own_tokens: Tokens whose KV was in this worker's pages.
        recomputed_tokens: Tokens whose KV was computed here because it could not be pulled.
        sources: Where the KV came from when the request started here from its token ids; all 0 if it was pulled.
        steps: Decode steps the request took part in.
    """

    worker: str
    pulled_tokens: int = 0
    own_tokens: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    queue_ms: float = 0.0
    handoff_ms: float = 0.0
    decode_ms: float = 0.0
    sources: TokenSources = TokenSources()
