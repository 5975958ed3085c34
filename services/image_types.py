"""What roles say to each other about images. Frozen values, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

DIGEST_BYTES: Final = 32
EMBEDDINGS: Final = "embeddings"  # region of an encode worker's memory, and of those that read from it
SPAN_ROWS: Final = 64  # embeddings in one slot of that region


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image in a prompt: ``tokens`` places from ``first_token`` on stand for it.

    Attributes:
        digest: 32 bytes over the file's bytes and the version of the preprocessing; enters the names of blocks.
        encoder: Worker that has its embeddings or is making them; empty where none is needed.
        incarnation: Which life of that worker.
    """

    first_token: int
    tokens: int
    digest: bytes
    encoder: str = ""
    incarnation: str = ""

    def __post_init__(self) -> None:
        if self.first_token < 0 or self.tokens <= 0 or len(self.digest) != DIGEST_BYTES:
            raise ValueError(
                f"impossible image: first_token={self.first_token}, tokens={self.tokens}, digest of "
                f"{len(self.digest)} bytes"
            )

    @property
    def end(self) -> int:
        """First position after it."""
        return self.first_token + self.tokens


@dataclass(frozen=True, slots=True)
class EncodeImage:
    """An image to embed; without ``data`` it is only looked up.

    Attributes:
        tokens: Length of its span as whoever asks has counted it; another count here is an error.
    """

    digest: bytes
    tokens: int
    data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """Images of one request.

    Attributes:
        trace: W3C traceparent, empty if none.
    """

    request_id: str
    images: tuple[EncodeImage, ...]
    trace: str = ""


@dataclass(frozen=True, slots=True)
class EncodeResult:
    """What became of a job: all images are ready, but for those that were only looked up and are ``missing``.

    Attributes:
        hits: Images that were ready before.
    """

    hits: int
    missing: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class EmbeddingWish:
    """Embeddings that a prefill worker wants to read.

    Attributes:
        fingerprint: Of the vision encoder that its model goes with.
    """

    digest: bytes
    tokens: int
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class LentEmbeddings:
    """Embeddings in the region ``embeddings`` under a lease: bfloat16, row by row, in slots one after another.

    Attributes:
        slots: Each holds ``SPAN_ROWS`` rows, the last one the rest.
        nbytes: Of all rows together.
        checksums: Of the used bytes of each slot.
    """

    lease: str
    incarnation: str
    slots: tuple[int, ...]
    nbytes: int
    checksums: tuple[int, ...]
