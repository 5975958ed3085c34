"""A request inside a step loop: few stored integers, everything else derived."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from epdserve.kvstore.hashing import ImageDigest
from epdserve.kvstore.slots import Slot
from epdserve.kvstore.types import BlockHash, PageId
from epdserve.model.batch import ImageSpan, Outputs, Segment
from epdserve.model.replay import CanonicalCuts, PrefillSpan
from epdserve.services.types import PlacedImage

TokenArray = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class RequestImage:
    """An image of a prompt; ``embeddings_ND`` (tokens, hidden) once they are here."""

    place: PlacedImage
    embeddings_ND: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class RunningRequest:
    """Token ids, pages and progress of one request. Not thread-safe, owned by the step loop.

    Attributes:
        tokens: (capacity,) int64; the first ``length`` are known.
        prompt_tokens: Where the prefill ends; decoder replay counts from here.
        span: Which rows the prefill runs and what they see.
        next_row: Next position to run; what lies before it was run, or found in the cache.
        pages: Pages in block order.
        sealed_blocks: Leading ``pages`` that are sealed and shared; this request alone holds and fills the others.
        hashes: Hash chain of the full blocks of the known tokens, as far as it was needed.
        tainted_from: Blocks that end after this token come after an encoder replay; None if there was none.
        resumed: Tokens beyond the prompt were drawn by an earlier worker, and hits may end among them.
        every_row: Every row is to be run in every layer: no hit is taken, no row is dropped.
        private: Its bytes differ from those held here under the same names, so it seals nothing any more.
        slot: State slot with window rows and open pairs; None while the request has no place in the batch.
        images: In order of their places.
        cuts: Where its prefill is cut so that its answer does not depend on what was cached; None = it is not.
        hit_tokens: Length of the hit it started from.
        replayed_rows: Rows that were, or are being, run again although their global KV is there.
    """

    request_id: str
    tokens: TokenArray
    length: int
    prompt_tokens: int
    tenant_key: bytes
    exact: bool
    span: PrefillSpan
    next_row: int = 0
    pages: list[PageId] = field(default_factory=list)
    sealed_blocks: int = 0
    hashes: list[BlockHash] = field(default_factory=list)
    tainted_from: int | None = None
    resumed: bool = False
    every_row: bool = False
    private: bool = False
    slot: Slot | None = None
    images: tuple[RequestImage, ...] = ()
    cuts: CanonicalCuts | None = None
    hit_tokens: int = 0
    replayed_rows: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.prompt_tokens <= self.length <= len(self.tokens):
            raise ValueError(
                f"{self.request_id}: prompt {self.prompt_tokens}, length {self.length}, room {len(self.tokens)}"
            )

    @property
    def known(self) -> TokenArray:
        """The known token ids."""
        return self.tokens[: self.length]

    @property
    def remaining_rows(self) -> int:
        """Known tokens that have not been run; while decoding one, the token sampled last."""
        return self.length - self.next_row

    @property
    def piece_rows(self) -> int:
        """Those of them that can be run under the present span."""
        end = self.span.end
        return (self.length if end is None else end) - self.next_row

    @property
    def blind_images(self) -> list[RequestImage]:
        """Images that rows yet to be run belong to and whose embeddings are not here."""
        return [i for i in self.images if i.embeddings_ND is None and i.place.end > self.next_row]

    @property
    def ready_rows(self) -> int:
        """Rows that can be run now: those before the first image whose embeddings are not here."""
        if not (blind := self.blind_images):
            return self.piece_rows
        return max(0, min(self.piece_rows, blind[0].place.first_token - self.next_row))

    @property
    def image_digests(self) -> list[ImageDigest]:
        """What the names of blocks take up."""
        return [ImageDigest(i.place.first_token, i.place.tokens, i.place.digest) for i in self.images]

    @property
    def stored_tokens(self) -> int:
        """Tokens whose global KV lies in ``pages``; during encoder replay more than the rows run so far."""
        return max(self.next_row, self.span.publish_from)

    @property
    def shareable_tokens(self) -> int:
        """Those of them that others may hit: of a deterministic request what its prefill made, for a prefill of the
        longer prompt would give other bits than decoding."""
        if self.private:
            return 0
        return self.stored_tokens if self.cuts is None else min(self.stored_tokens, self.prompt_tokens)

    def pages_missing(self, tokens: int, block_tokens: int) -> int:
        """Pages to reserve before the first ``tokens`` tokens have a place."""
        return max(0, -(-tokens // block_tokens) - len(self.pages))

    def append(self, token: int) -> None:
        """Add a sampled token."""
        self.tokens[self.length] = token
        self.length += 1

    def begin(self, span: PrefillSpan) -> None:
        """Start a prefill, or the next piece of one."""
        self.span, self.next_row = span, span.first_row
        self.replayed_rows += span.replayed_rows

    def go_on(self) -> None:
        """After a step: the next piece, if this one is over. What is stored, and may be sealed, stays the same."""
        if self.cuts is not None and self.next_row == self.span.end:
            self.begin(self.cuts.span(self.next_row, prompt_tokens=self.prompt_tokens))

    def is_exact(self, end_token: int) -> bool:
        """Whether a block that ends before ``end_token`` has no encoder replay upstream."""
        return self.tainted_from is None or end_token <= self.tainted_from

    def segment(self, rows: int, outputs: Outputs) -> Segment:
        """The next ``rows`` rows. The prefill's floors hold for generated rows too: their windows lie above."""
        assert self.slot is not None, f"{self.request_id} runs without a state slot"
        return Segment(
            tokens=self.tokens,
            start=self.next_row,
            count=rows,
            pages=self.pages,
            slot=self.slot.index,
            encoder_floor=self.span.encoder_floor,
            decoder_from=self.span.decoder_from,
            decoder_floor=self.span.decoder_floor,
            publish_from=self.span.publish_from,
            outputs=outputs,
            images=[
                ImageSpan(image.place.first_token, image.embeddings_ND)
                for image in self.images
                if image.embeddings_ND is not None
            ],
        )
