"""What the roles say to each other: jobs, handles, chunks, worker facts. Frozen values, no behaviour.

Token ids travel as ``TokenIds``: read-only int32 arrays, the same little-endian bytes as on the wire, so a
prompt of 100k tokens is never walked in Python. Hashes, keys and roots are plain bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from epdserve.services.errors import STATUS, Internal, ServiceError
from epdserve.services.image_types import PlacedImage as PlacedImage
from epdserve.services.receipts import DecodeReceipt as DecodeReceipt
from epdserve.services.receipts import TokenSources as TokenSources
from epdserve.services.sampling import MAX_TOP_LOGPROBS, Grammar, PromptLogprobs, TokenLogprob
from epdserve.services.sampling import SamplingParams as SamplingParams
from epdserve.services.schedule import UNHURRIED, Schedule
from epdserve.services.worker_types import BlockUpdate as BlockUpdate
from epdserve.services.worker_types import TransferEndpoint as TransferEndpoint
from epdserve.services.worker_types import TransferRegion as TransferRegion
from epdserve.services.worker_types import WorkerDescription as WorkerDescription
from epdserve.services.worker_types import WorkerInfo as WorkerInfo
from epdserve.services.worker_types import WorkerRole as WorkerRole
from epdserve.services.worker_types import WorkerState as WorkerState

TokenIds: TypeAlias = npt.NDArray[np.int32]

MAX_READERS: Final = 128  # choices that share one prefill
WIRE_VERSION: Final = 1  # goes up when two versions of these processes can no longer talk (proto/README.md)

_INT32_MAX = 2**31 - 1
_TOKEN_DTYPE: Final = np.dtype("<i4")
_least: Final = np.minimum.reduce  # what ``min`` calls, without its detour through Python


def token_ids(values: Iterable[int] | npt.NDArray[np.integer]) -> TokenIds:
    """Token ids as a read-only, contiguous int32 array; an array that is one already is returned as it is.

    Raises:
        ValueError: Not one-dimensional, not integers, or an id outside [0, 2**31).
    """
    ids = values if isinstance(values, np.ndarray) else np.array(tuple(values) or (), dtype=np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"token ids must be a list of integers, got shape {ids.shape} of {ids.dtype}")
    fits = ids.dtype == _TOKEN_DTYPE  # then none can be too large, and looking costs more than the copy
    if ids.size and not (int(_least(ids)) >= 0 and (fits or int(ids.max()) <= _INT32_MAX)):
        raise ValueError(f"token ids must lie in [0, 2**31), got {int(ids.min())}..{int(ids.max())}")
    if fits and ids.flags.c_contiguous and not ids.flags.writeable:
        same: TokenIds = ids  # type: ignore[assignment]
        return same
    out: TokenIds = np.array(ids, dtype=_TOKEN_DTYPE, order="C")
    out.flags.writeable = False
    return out


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard the model is asked to think, 1 to 100 (low 50, high 75, max 100)."""

    level: int

    def __post_init__(self) -> None:
        if not 1 <= self.level <= 100:
            raise ValueError(f"effort must lie in 1..100, got {self.level}")


@dataclass(frozen=True, slots=True)
class BlockRef:
    """One sealed block in a worker's pages: where it is, and how a reader knows it got the right bytes."""

    page: int
    generation: int
    block_hash: bytes
    checksum: int
    exact: bool


@dataclass(frozen=True, slots=True)
class TailRef:
    """The tail record of a request in a worker's staging slots; ``exact`` if no encoder replay is upstream of it."""

    slot: int
    generation: int
    nbytes: int
    checksum: int
    exact: bool


@dataclass(frozen=True, slots=True)
class KVHandle:
    """What a prefill worker promises to keep readable until the lease ends.

    Attributes:
        worker: Who holds it; readers look its address up in their own registry view.
        incarnation: Which life of that worker; another one holds none of these pages.
        blocks: Full blocks from position 0 on, in order.
        tail: What the blocks do not hold: windows, open block, last ids, exit vector.
        tokens: Number of tokens covered by blocks and tail together.
    """

    worker: str
    incarnation: str
    lease: str
    blocks: tuple[BlockRef, ...]
    tail: TailRef
    tokens: int


class _ByValue:
    """Equality for values that hold arrays; such values are not hashable."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [item.name for item in fields(self)]  # type: ignore[arg-type]
        return all(_equal(getattr(self, name), getattr(other, name)) for name in names)


def _equal(left: object, right: object) -> bool:
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return bool(np.array_equal(left, right))  # type: ignore[arg-type]
    return left == right


def _check_modes(exact: bool, deterministic: bool) -> None:
    if exact and deterministic:
        raise ValueError("exact runs a halo where deterministic replays a window")


def _check_images(images: Iterable[PlacedImage], tokens: int) -> None:
    end = 0
    for image in images:
        if image.first_token < end or image.end > tokens:
            raise ValueError(f"images overlap, or reach beyond {tokens} tokens")
        end = image.end


@dataclass(frozen=True, slots=True, eq=False)
class PrefillJob(_ByValue):
    """Fill KV for a prompt.

    Attributes:
        tokens: The prompt; any iterable of ids is taken, a ``TokenIds`` array is stored.
        tenant_key: Keys the block hashes; two tenants share no block.
        exact: Take only blocks made without encoder replay.
        deterministic: Prefill in canonical pieces: no bit depends on what is cached. Not with ``exact``.
        trace: W3C traceparent, empty if none.
        readers: How many decode jobs will pull the answer; each gets a lease of its own.
        prompt_logprobs: Alternatives told with each prompt token's log-probability; None = nothing is told. Such a
            job must be ``exact``: every row is run.
        tail_at: Where the next turn's prompt is likely to leave this one: a tail is kept there.
        images, schedule: In order of their places; how urgent it is.
    """

    request_id: str
    tokens: TokenIds
    tenant_key: bytes
    exact: bool = False
    trace: str = ""
    readers: int = 1
    prompt_logprobs: int | None = None
    tail_at: int | None = None
    images: tuple[PlacedImage, ...] = ()
    schedule: Schedule = UNHURRIED
    deterministic: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", token_ids(self.tokens))
        _check_images(self.images, len(self.tokens))
        _check_modes(self.exact, self.deterministic)
        if self.tail_at is not None and not 0 < self.tail_at < len(self.tokens):
            raise ValueError(f"tail_at={self.tail_at} in a prompt of {len(self.tokens)} tokens")
        if not 1 <= self.readers <= MAX_READERS:
            raise ValueError(f"readers must lie in 1..{MAX_READERS}, got {self.readers}")
        if self.prompt_logprobs is not None and not (
            self.exact and 0 <= self.prompt_logprobs <= MAX_TOP_LOGPROBS
        ):
            raise ValueError(f"prompt_logprobs={self.prompt_logprobs} with exact={self.exact}")


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """What a prefill did.

    Attributes:
        cached_tokens: The hit length; ``sources`` says where it was found.
        replayed_rows: Cached positions recomputed for the window.
        computed_tokens: Tokens whose KV was computed.
        more_leases: Leases of the second and further readers, on the same pages and tail.
    """

    handle: KVHandle
    cached_tokens: int
    replayed_rows: int
    computed_tokens: int
    queue_ms: float
    run_ms: float
    more_leases: tuple[str, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    sources: TokenSources = field(default_factory=TokenSources)

    @property
    def handles(self) -> tuple[KVHandle, ...]:
        """One handle for each reader; each is to be pulled, or its lease ended, by itself."""
        return (self.handle, *(replace(self.handle, lease=lease) for lease in self.more_leases))


@dataclass(frozen=True, slots=True, eq=False)
class DecodeJob(_ByValue):
    """Produce tokens after a prompt.

    Attributes:
        tokens: The prompt.
        handle: Where the KV of ``tokens + emitted`` lies, of ``tokens`` if the job is ``deterministic``; None =
            recompute it here.
        emitted: Tokens already delivered by an earlier worker. Offsets go on counting: that of the first
            chunk is ``len(emitted)``.
        grammar: What the output must look like; its state is rebuilt from ``emitted``.
        timeout_s: From the job's arrival to the end of its output; None = no end.
        keep_tail: The next turn is likely to begin with all of this one: a tail is kept where it ends.
        images: Of the prompt, in order of their places.
        schedule: Whom to take out when pages run out.
        deterministic: As of the prefill; generated tokens are run again after a death.
    """

    request_id: str
    tokens: TokenIds
    tenant_key: bytes
    exact: bool
    sampling: SamplingParams
    handle: KVHandle | None
    emitted: TokenIds = field(default_factory=lambda: token_ids(()))
    trace: str = ""
    grammar: Grammar | None = None
    timeout_s: float | None = None
    keep_tail: bool = True
    images: tuple[PlacedImage, ...] = ()
    schedule: Schedule = UNHURRIED
    deterministic: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", token_ids(self.tokens))
        _check_images(self.images, len(self.tokens))
        _check_modes(self.exact, self.deterministic)
        object.__setattr__(self, "emitted", token_ids(self.emitted))
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}")


class FinishReason(StrEnum):
    """Why a request ended well."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """A ``ServiceError`` as a value; ``code`` is the error's stable name."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    worker: str | None = None
    tokens_delivered: int | None = None

    @classmethod
    def of(cls, error: ServiceError) -> ErrorInfo:
        """The value of an error."""
        return cls(
            error.code, error.message, error.param, error.retry_after_s, error.worker, error.tokens_delivered
        )

    def to_error(self) -> ServiceError:
        """The error of a value; a code that this version does not know becomes ``Internal``."""
        kind = STATUS[self.code].error if self.code in STATUS else Internal
        return kind(
            self.message,
            param=self.param,
            retry_after_s=self.retry_after_s,
            worker=self.worker,
            tokens_delivered=self.tokens_delivered,
        )


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """New tokens of one request: the first of them is number ``offset`` of its output.

    A chunk with a finish reason or an error is the request's last; it may hold no tokens.

    Attributes:
        logprobs: One for each token if the request asked for them, else empty.
    """

    request_id: str
    offset: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    receipt: DecodeReceipt | None = None
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def end(self) -> int:
        """Offset of the next chunk."""
        return self.offset + len(self.tokens)

    @property
    def final(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None or self.error is not None
