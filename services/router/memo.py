"""The ids a model drew for each message it delivered, put back when the text of the message comes back.

A conversation comes back as text. Encoding it again gives the *canonical* ids of that text, and a model may have drawn
others: the next turn would then miss every cached block from there on. So the router remembers what was drawn, by what
it is encoded to, and splices it into the prompt. It is a cache: bounded, per tenant, lost with the router; a miss costs
hits and nothing else. A router that did not deliver a message does not know it: conversations should stay at one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Final

import numpy as np
from epdserve.services.router.tokenizer import RouterTokenizer
from epdserve.services.types import TokenIds, token_ids

_KEY_BYTES: Final = 16
_ENTRY_BYTES: Final = 200  # of an entry beside its ids
_MOST_WAITING: Final = 64
_FORGOTTEN: Final = 16_384  # keys remembered after their ids were dropped
_AT_ONCE: Final = 64  # ids of an answer that cost less to encode than the way to a thread and back


class Turn(Enum):
    """What became of one part (reasoning or content) of an earlier answer in a prompt; label of the metric."""

    SPLICED = "spliced"  # the drawn ids were put back
    SAME = "same"  # the drawn ids are what the text is encoded to
    UNKNOWN = "unknown"  # never delivered here, or edited
    EVICTED = "evicted"  # other ids were drawn, and have been forgotten


class Kept(Enum):
    """What was remembered of an answer's part; label of the metric."""

    CANONICAL = "canonical"  # what its text is encoded to: nothing to put back
    OTHER = "other"
    NO_TEXT = "no_text"  # not UTF-8: its text cannot come back
    TOO_LONG = "too_long"
    BUSY = "busy"  # too many answers ended at once


@dataclass(slots=True)
class _Tenant:
    """Entries of one tenant, least recently used first; None stands for canonical ids."""

    entries: OrderedDict[bytes, TokenIds | None] = field(default_factory=OrderedDict)
    nbytes: int = 0


class TurnMemo:
    """Thread-safe.

    Args:
        max_bytes: Of all tenants together; whoever holds most loses first.
    """

    def __init__(self, tokenizer: RouterTokenizer, *, max_bytes: int) -> None:
        self._tokenizer, self._max_bytes = tokenizer, max_bytes
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memo")
        self._waiting = threading.BoundedSemaphore(_MOST_WAITING)
        self._tenants: dict[bytes, _Tenant] = {}
        self._forgotten: OrderedDict[bytes, None] = OrderedDict()
        self.nbytes = 0

    def note(self, tenant_key: bytes, prompt: TokenIds, drawn: Sequence[int]) -> list[Kept]:
        """Remember an answer.

        Args:
            prompt: Ends with the header of an answer, else nothing is remembered.
            drawn: All ids of the answer, its end marker included if it has one.

        Returns:
            What became of each of its parts.
        """
        tokenizer = self._tokenizer
        if not len(prompt) or prompt[-1] not in (tokenizer.think_start_id, tokenizer.think_end_id):
            return []
        ids = list(drawn)
        if tokenizer.eos_id in ids:
            del ids[ids.index(tokenizer.eos_id) :]
        reasoning: list[int] = []
        if prompt[-1] == tokenizer.think_start_id:
            end = ids.index(tokenizer.think_end_id) if tokenizer.think_end_id in ids else len(ids)
            reasoning, ids = ids[:end], ids[end + 1 :]
        kept = (
            [self._keep(tenant_key, reasoning, self._canonical(reasoning, _reasoning))] if reasoning else []
        )
        return kept + ([self._keep(tenant_key, ids, self._canonical(ids, self._content))] if ids else [])

    def note_soon(
        self,
        tenant_key: bytes,
        prompt: TokenIds,
        drawn: Sequence[int],
        told: Callable[[Sequence[Kept]], None],
    ) -> None:
        """``note`` in a thread of its own: encoding two thousand tokens takes some ten milliseconds.

        Args:
            told: What ``note`` says; called in that thread, or here for a short answer.
        """
        if len(drawn) <= _AT_ONCE:
            told(self.note(tenant_key, prompt, drawn))
            return
        if not self._waiting.acquire(blocking=False):
            told([Kept.BUSY])
            return

        def work() -> None:
            try:
                told(self.note(tenant_key, prompt, drawn))
            finally:
                self._waiting.release()

        self._thread.submit(work)

    def close(self) -> None:
        """End the thread; what it has not begun is not remembered."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def splice(self, tenant_key: bytes, prompt: TokenIds) -> tuple[TokenIds, list[Turn]]:
        """A prompt with the drawn ids of earlier answers, as far as they are remembered, and what became of each."""
        pieces: list[TokenIds] = []
        turns: list[Turn] = []
        done = 0
        for start, end in self._parts(prompt):
            turn, ids = self._recall(tenant_key, prompt[start:end])
            turns.append(turn)
            if ids is not None:
                pieces += [prompt[done:start], ids]
                done = end
        if not pieces:
            return prompt, turns
        return token_ids(np.concatenate([*pieces, prompt[done:]])), turns

    def _parts(self, prompt: TokenIds) -> Iterator[tuple[int, int]]:
        """Where reasoning and content of complete answers lie: [start, end) each, in order."""
        tokenizer = self._tokenizer
        is_header = prompt == tokenizer.assistant_id
        if np.count_nonzero(is_header) < 2:
            return  # a conversation that only begins
        headers = np.flatnonzero(is_header)
        ends = np.flatnonzero(prompt == tokenizer.eos_id)
        thought_ends = np.flatnonzero(prompt == tokenizer.think_end_id)
        for header in headers:
            first = int(header) + 1
            after = np.searchsorted(ends, first)
            if after == len(ends):
                return  # the answer that is to come, or one that is continued
            last = int(ends[after])
            if prompt[first] == tokenizer.think_start_id:
                thought = np.searchsorted(thought_ends, first)
                if thought == len(thought_ends) or thought_ends[thought] > last:
                    continue
                end = int(thought_ends[thought])
                if end > first + 1:
                    yield first + 1, end
                first = end
            if last > first + 1:
                yield first + 1, last

    def _keep(self, tenant_key: bytes, ids: list[int], canonical: list[int] | None) -> Kept:
        if canonical is None:
            return Kept.NO_TEXT
        same = canonical == ids
        kept = None if same else token_ids(ids)
        size = _ENTRY_BYTES + (0 if kept is None else kept.nbytes)
        if size > self._max_bytes:
            return Kept.TOO_LONG
        key = _key(tenant_key, np.array(canonical, dtype="<i4"))
        with self._lock:
            tenant = self._tenants.setdefault(tenant_key, _Tenant())
            self._drop(tenant, key)
            tenant.entries[key] = kept
            tenant.nbytes += size
            self.nbytes += size
            self._forgotten.pop(key, None)
            while self.nbytes > self._max_bytes:
                self._evict()
        return Kept.CANONICAL if same else Kept.OTHER

    def _recall(self, tenant_key: bytes, canonical: TokenIds) -> tuple[Turn, TokenIds | None]:
        key = _key(tenant_key, canonical)
        with self._lock:
            tenant = self._tenants.get(tenant_key)
            if tenant is None or key not in tenant.entries:
                return (Turn.EVICTED if key in self._forgotten else Turn.UNKNOWN), None
            tenant.entries.move_to_end(key)
            ids = tenant.entries[key]
        return (Turn.SAME if ids is None else Turn.SPLICED), ids

    def _canonical(self, ids: list[int], delivered: Callable[[str, int | None], str]) -> list[int] | None:
        """What drawn ids are encoded to when their text comes back; None if they are no text.

        Markers are kept, what is between them is text. ``delivered`` says what the client gets of the first text,
        given the marker after it.
        """
        vocabulary, plain = self._tokenizer.vocabulary, self._tokenizer.plain_ids
        canonical: list[int] = []
        start = 0
        for end in [*vocabulary.marker_places(ids), len(ids)]:
            marker = ids[end] if end < len(ids) else None
            try:
                text = b"".join(map(vocabulary.bytes_of, ids[start:end])).decode()
            except UnicodeDecodeError:
                return None
            if start == 0:
                text = delivered(text, marker)
            if text:
                canonical += plain(text)
            if marker is not None:
                canonical.append(marker)
            start = end + 1
        return canonical

    def _content(self, text: str, marker: int | None) -> str:
        """Newlines before content go, and calls stand apart from it by two, as they are rendered."""
        text = text.lstrip("\n")
        if marker == self._tokenizer.dsml_id and text.endswith("<"):
            text = text[:-1].rstrip("\n") + "\n\n<"
        return text

    # -- under the lock -------------------------------------------------------------------------------------

    def _drop(self, tenant: _Tenant, key: bytes) -> TokenIds | None:
        if key not in tenant.entries:
            return None
        ids = tenant.entries.pop(key)
        size = _ENTRY_BYTES + (0 if ids is None else ids.nbytes)
        tenant.nbytes -= size
        self.nbytes -= size
        return ids

    def _evict(self) -> None:
        """Drop the least recently used entry of the tenant that holds most."""
        name, tenant = max(self._tenants.items(), key=lambda item: item[1].nbytes)
        key = next(iter(tenant.entries))
        if self._drop(tenant, key) is not None:
            self._forgotten[key] = None
            if len(self._forgotten) > _FORGOTTEN:
                self._forgotten.popitem(last=False)
        if not tenant.entries:
            del self._tenants[name]


def _reasoning(text: str, marker: int | None) -> str:
    """Newlines around reasoning are not delivered."""
    return text.strip("\n")


def _key(tenant_key: bytes, canonical: TokenIds) -> bytes:
    key = blake2b(key=tenant_key[:64], digest_size=_KEY_BYTES, person=b"epdserve-memo")
    key.update(np.ascontiguousarray(canonical, dtype="<i4").data)
    return key.digest()
