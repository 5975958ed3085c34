"""A request inside a step loop: few stored integers, everything else derived."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from epdserve.kvstore.slots import Slot
from epdserve.kvstore.types import BlockHash, PageId
from epdserve.model.batch import Outputs, Segment
from epdserve.model.replay import PrefillSpan

TokenArray = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class RunningRequest:
    """Token ids, pages and progress of one request. Not thread-safe, owned by the step loop.

    Attributes:
        tokens: (capacity,) int64; the first ``length`` are known.
        prompt_tokens: Where the prefill ends; decoder replay counts from here.
        next_row: Next position to run; all before it are done or were found in the cache.
        pages: Pages in block order; they cover at least ``next_row`` tokens.
        filling: Those of ``pages`` that only this request holds and may write; the others are sealed.
        hashes: Hash chain of the full blocks of the known tokens, as far as it was needed.
        sealed_blocks: Blocks from the start on that were offered for sealing.
        exact: Hits made with encoder replay are not taken.
        tainted_from: Blocks from this token on come after an encoder replay (``length`` limit: never).
        slot: State slot: window rows and open pairs; None while preempted or not admitted.
    """

    request_id: str
    arrival: int
    tokens: TokenArray
    length: int
    prompt_tokens: int
    tenant_key: bytes
    exact: bool
    span: PrefillSpan
    next_row: int = 0
    pages: list[PageId] = field(default_factory=list)
    filling: set[PageId] = field(default_factory=set)
    hashes: list[BlockHash] = field(default_factory=list)
    sealed_blocks: int = 0
    tainted_from: int | None = None
    slot: Slot | None = None

    def __post_init__(self) -> None:
        if not 0 < self.prompt_tokens <= self.length <= len(self.tokens):
            raise ValueError(
                f"{self.request_id}: prompt {self.prompt_tokens}, length {self.length}, room {len(self.tokens)}"
            )

    @property
    def remaining_rows(self) -> int:
        """Known tokens that have not been run; a decoding request has one, the token sampled last."""
        return self.length - self.next_row

    @property
    def stored_tokens(self) -> int:
        """Tokens whose global KV lies in ``pages``."""
        return max(self.next_row, self.span.publish_from)

    @property
    def sealed_pages(self) -> list[PageId]:
        """Pages shared through the prefix index; released at the end."""
        return [page for page in self.pages if page not in self.filling]

    def pages_missing(self, rows: int, block_tokens: int) -> int:
        """Pages to reserve before ``rows`` more rows can run."""
        return max(0, -(-(self.next_row + rows) // block_tokens) - len(self.pages))

    def append(self, token: int) -> None:
        """Add a sampled token."""
        self.tokens[self.length] = token
        self.length += 1

    def add_pages(self, pages: Sequence[PageId]) -> None:
        """Take freshly reserved pages."""
        self.pages.extend(pages)
        self.filling.update(pages)

    def segment(self, count: int, outputs: Outputs) -> Segment:
        """The next ``count`` rows. Floors of the prefill hold for generated rows too: their windows lie above."""
        assert self.slot is not None, f"{self.request_id} runs without a state slot"
        return Segment(
            tokens=self.tokens,
            start=self.next_row,
            count=count,
            pages=self.pages,
            slot=self.slot.index,
            encoder_floor=self.span.encoder_floor,
            decoder_from=self.span.decoder_from,
            decoder_floor=self.span.decoder_floor,
            publish_from=self.span.publish_from,
            outputs=outputs,
        )
