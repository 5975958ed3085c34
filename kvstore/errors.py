"""Errors of the KV store.

KVStoreError
  OutOfPages           no page can be freed for a reservation
  WrongPhase           a page was asked for a step its phase does not allow (the caller's bug)
  SlotNotHeld          a slot was given back twice, or by someone who no longer owns it (the caller's bug)
  CorruptBlock         bytes are not the block that was asked for
  ConservationError    pages or slots do not add up (our bug)
  TransferFailed       a transfer ended without all of its bytes
    PeerLost           the other side is gone
  UnknownPeer          the peer was never connected, or was forgotten
  TransferUnavailable  the transport cannot be set up on this machine

A cache miss, an ended lease and a transfer that misses its deadline are not errors: they are return values.
"""

from __future__ import annotations


# ruff: noqa: N818
class KVStoreError(Exception):
    """Base of everything the KV store raises on purpose."""


class OutOfPages(KVStoreError):
    """No page can be freed for a reservation. Nothing was changed."""

    def __init__(self, asked: int, available: int) -> None:
        super().__init__(f"asked for {asked} pages, {available} can be had")
        self.asked, self.available = asked, available


class WrongPhase(KVStoreError):
    """A page was asked for a step that its phase does not allow. Nothing was changed."""

    def __init__(self, page: int, phase: str, event: str) -> None:
        super().__init__(f"page {page} is {phase}, which does not allow {event}")
        self.page, self.phase, self.event = page, phase, event


class SlotNotHeld(KVStoreError):
    """A slot was given back by someone who does not own it."""

    def __init__(self, index: int, generation: int, state: str) -> None:
        super().__init__(f"slot {index} of generation {generation} is not held (it is {state})")
        self.index, self.generation, self.state = index, generation, state


class CorruptBlock(KVStoreError):
    """Bytes are not the block that was asked for. ``field`` says which part of the header disagrees."""

    def __init__(self, block_hash: bytes, *, field: str, found: object, wanted: object) -> None:
        super().__init__(f"block {block_hash.hex()}: {field} is {found!r}, expected {wanted!r}")
        self.block_hash, self.field, self.found, self.wanted = block_hash, field, found, wanted


class ConservationError(KVStoreError):
    """Pages or slots do not add up. ``problems`` lists every broken rule."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class TransferFailed(KVStoreError):
    """A transfer ended without all of its bytes.

    The destination is undefined, and nothing more will be written.
    """

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"transfer from {peer} failed: {reason}")
        self.peer, self.reason = peer, reason


class PeerLost(TransferFailed):
    """The other side of a transfer is gone."""


class UnknownPeer(KVStoreError):
    """The peer was never connected, or was forgotten."""

    def __init__(self, peer: str) -> None:
        super().__init__(f"unknown peer {peer}")
        self.peer = peer


class TransferUnavailable(KVStoreError):
    """The transport cannot be set up on this machine."""
