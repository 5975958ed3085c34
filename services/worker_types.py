"""What workers tell of themselves: facts of heartbeats, doors to their memory, blocks they hold. Frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class WorkerRole(StrEnum):
    """What a worker does."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"
    STORE = "store"


class WorkerState(StrEnum):
    """Whether a worker takes work."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker as its heartbeat tells it.

    Attributes:
        incarnation: This life of the worker; greater (as a string) than that of any earlier life.
        address: gRPC, ``host:port``.
        metrics_address: ``host:port`` of ``/metrics``.
        cache_root: Root of the block hashes; only workers of one root share blocks.
        queued_tokens: Tokens of work waiting.
        running: Requests in the step loop.
        step_age_s: Age of the running step, 0 between steps.
        machine: Workers of one machine use its store; filled in by whoever sends the heartbeat.
        encodes: Embeds images, whatever its role.
        deterministic_root: Root of the block hashes of deterministic requests, the same only where bits are; empty = it
            takes none.
        host_bytes_per_s, ssd_bytes_per_s, peer_bytes_per_s: What its store's tiers gave it lately; 0 = not measured.
    """

    worker: str
    role: WorkerRole
    incarnation: str
    address: str
    metrics_address: str
    state: WorkerState
    cache_root: bytes
    block_tokens: int
    max_context_tokens: int
    queued_tokens: int
    running: int
    free_pages: int
    total_pages: int
    step_age_s: float
    wire_version: int
    model_name: str
    machine: str = ""
    encodes: bool = False
    deterministic_root: bytes = b""
    host_bytes_per_s: float = 0.0
    ssd_bytes_per_s: float = 0.0
    peer_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TransferRegion:
    """A registered memory region of a peer; ``device_id`` is -1 for host memory."""

    name: str
    address: int
    stride: int
    count: int
    device_id: int


@dataclass(frozen=True, slots=True)
class TransferEndpoint:
    """What a peer must know to read a worker's memory."""

    agent: str
    metadata: bytes
    regions: tuple[TransferRegion, ...]


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """A worker's facts together with the door to its memory."""

    info: WorkerInfo
    endpoint: TransferEndpoint


@dataclass(frozen=True, slots=True)
class BlockUpdate:
    """Blocks that a worker now holds or no longer holds.

    Attributes:
        incarnation: The worker's life these numbers belong to.
        snapshot: ``added`` is everything held as of ``next_seq``; what was known before is void.
        first_seq, next_seq: Of the first event, and one past the last; a delta begins where the one before ended.
        digest: Of everything held as of ``next_seq`` (``kvstore/set_digest.py``); empty = not told.
    """

    incarnation: str
    snapshot: bool
    first_seq: int
    next_seq: int
    added: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    digest: bytes = b""
