"""The door of the tier: what is let in, copied, and queued. Never waits for a disk.

Hundreds of blocks come at a time, so headers are checked and names are made for all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, NoReturn

import numpy as np
from epdserve.kvstore.block_header import HEADER_BYTES, HEADER_DTYPE, BlockHeader, are_headers
from epdserve.kvstore.native import all_aligned, gather
from epdserve.kvstore.ssd.core import TierCore
from epdserve.kvstore.ssd.directory import Directory
from epdserve.kvstore.ssd.disk import Bytes
from epdserve.kvstore.ssd.pacing import EnduranceBudget, SecondHit
from epdserve.kvstore.ssd.record import ALIGNMENT, EXACT, NAME_BYTES, name_rows
from epdserve.kvstore.ssd.retention import Admission, Space, admit
from epdserve.kvstore.ssd.slots import is_aligned
from epdserve.kvstore.ssd.write_behind import ID_BYTES, BlockPut, Pending
from epdserve.kvstore.types import BLOCK_HASH_BYTES, BlockHash
from numpy.typing import NDArray

MAY_PASS: Final = (Admission.QUEUE_FULL, Admission.NO_SPACE, Admission.QUOTA)  # after a pump or a sweep


class _Ends(NamedTuple):
    """What was read of pages, once: from the last whole sector of the payload to the end of the header."""

    rows: Bytes  # (blocks, bytes)
    headers: NDArray[np.void]  # ``HEADER_DTYPE``, within them
    hashes: list[BlockHash]
    exact: list[bool]


class Intake:
    """Thread-safe."""

    def __init__(self, core: TierCore, budget: EnduranceBudget, second_hit: SecondHit) -> None:
        self._core, self._budget, self._second_hit = core, budget, second_hit

    def offer_all(self, puts: Sequence[BlockPut], *, copy: bool) -> list[Admission]:
        """Let blocks in or not, one after the other, as far as that gets without a pump or a sweep.

        Args:
            puts: What is offered.
            copy: Else an aligned page is kept, but for its end, and must not change until it is stored.

        Returns:
            What became of the first ones. The last of them may be QUEUE_FULL, NO_SPACE or QUOTA; the others are not.

        Raises:
            CorruptBlock, ValueError: A page has no valid header, or one of another size; those before it are let in.
        """
        core = self._core
        ends = self._read_ends(puts)
        answers: list[Admission] = []
        taken: list[Pending] = []
        numbers: list[int] = []  # of the puts that were taken
        with core.lock:
            self._let_in(puts, ends, answers, taken, numbers)
        if taken:
            self._bring(taken, [puts[number] for number in numbers], ends, numbers, copy=copy)
            with core.lock:
                core.queue.enqueue(taken)
        core.metrics.offered(answers)
        wrong = len(ends.hashes)
        if len(answers) == wrong < len(puts) and not (answers and answers[-1] in MAY_PASS):
            self._refuse(puts[wrong])
        return answers

    def _read_ends(self, puts: Sequence[BlockPut]) -> _Ends:
        """Of the pages before the first one that is no block."""
        layout = self._core.layout
        enough = [put.page.nbytes >= layout.page_bytes for put in puts]
        pages = [put.page for put in puts[: enough.index(False) if False in enough else None]]
        raw = gather(pages, layout.end_offset, layout.name_at)
        rows = np.frombuffer(raw, np.uint8).reshape(len(pages), layout.name_at)
        headers = rows[:, layout.name_at - HEADER_BYTES :].view(HEADER_DTYPE)[:, 0]
        sound = are_headers(headers, layout.payload_bytes)
        count = len(pages) if sound.all() else int(sound.argmin())
        names = headers["block_hash"].tobytes()
        size = BLOCK_HASH_BYTES
        hashes = [BlockHash(names[size * at : size * (at + 1)]) for at in range(count)]
        return _Ends(rows, headers, hashes, (headers["flags"][:count] == EXACT).tolist())

    def _refuse(self, put: BlockPut) -> NoReturn:
        """Say why a page is not taken."""
        layout = self._core.layout
        header = BlockHeader.decode(put.page.data[layout.payload_bytes : layout.page_bytes])
        raise ValueError(f"blocks here have {layout.payload_bytes} bytes, got {header.payload_bytes}")

    def _let_in(
        self,
        puts: Sequence[BlockPut],
        ends: _Ends,
        answers: list[Admission],
        taken: list[Pending],
        numbers: list[int],
    ) -> None:
        """Under the lock: decide, and take slots and buffers."""
        core, inventory = self._core, self._core.inventory
        serving, space, now = inventory.serving(), inventory.space(), core.clock.monotonic()
        unasked = self._unasked(space)
        if len(serving) == 1 and 0 < len(ends.hashes) <= unasked and self._all_new(ends.hashes):
            taken += self._take_all(puts, ends.hashes, serving[0], now)
            numbers += range(len(taken))
            answers += [Admission.ACCEPTED] * len(taken)
            return
        for number, (block_hash, exact) in enumerate(zip(ends.hashes, ends.exact, strict=True)):
            put, reserve = puts[number], False
            if unasked > 0 and not inventory.holds(block_hash) and block_hash not in core.queue.by_hash:
                answer = Admission.ACCEPTED
            else:
                answer, reserve = self._decide(put, block_hash, space, exact=exact)
            answers.append(answer)
            if answer is Admission.ACCEPTED:
                taken.append(self._take(put, block_hash, serving, now, reserve=reserve))
                numbers.append(number)
                space = Space(space.total, space.free - 1, space.reserve_used + reserve)
                unasked -= 1
            elif answer in MAY_PASS:
                return

    def _all_new(self, hashes: list[BlockHash]) -> bool:
        """Whether none is stored or on its way, or there twice."""
        core = self._core
        return (
            len(set(hashes)) == len(hashes)
            and core.inventory.holds_none(hashes)
            and core.queue.by_hash.keys().isdisjoint(hashes)
        )

    def _take_all(
        self, puts: Sequence[BlockPut], hashes: list[BlockHash], directory: Directory, now: float
    ) -> list[Pending]:
        """``_take`` of many at once, into the one directory that serves."""
        queue, count = self._core.queue, len(hashes)
        slots, buffers = directory.take_some(count), queue.take_buffers(count)
        taken = [
            Pending(block_hash, put.tenant, put.root[:ID_BYTES], False, directory, slot, buffer, now)
            for block_hash, put, slot, buffer in zip(hashes, puts, slots, buffers, strict=False)
        ]
        queue.by_hash.update(zip(hashes, taken, strict=True))
        self._core.inventory.tenant_slots.update([pending.tenant for pending in taken])
        return taken

    def _unasked(self, space: Space) -> int:
        """How many new blocks come in whosever they are: what ``_decide`` would say of each."""
        policy, limited = self._core.policy, self._budget.limited or self._second_hit.limited
        if limited or policy.default_quota_bytes is not None or policy.quota_bytes:
            return 0
        return min(self._core.queue.room, space.general_free(policy))

    def _bring(
        self, taken: list[Pending], puts: list[BlockPut], ends: _Ends, numbers: list[int], *, copy: bool
    ) -> None:
        """Fill the buffers: all of a page, or its end with the name behind it."""
        queue, layout = self._core.queue, self._core.layout
        may_stay = not copy and layout.end_offset > 0
        all_stay = may_stay and all_aligned([put.page for put in puts], ALIGNMENT)
        for pending, put in zip(taken, puts, strict=True):
            if all_stay or (may_stay and is_aligned(put.page)):
                pending.page = put.page
            else:
                queue.buffers[pending.buffer][: layout.end_offset] = put.page[: layout.end_offset]
        buffers, behind = [pending.buffer for pending in taken], layout.name_at + NAME_BYTES
        queue.end_rows[buffers, : layout.name_at] = ends.rows[numbers]
        queue.names[buffers] = name_rows(
            ends.headers[numbers],
            [put.parent for put in puts],
            [(pending.tenant, pending.root) for pending in taken],
            [pending.reserve for pending in taken],
        )
        queue.end_rows[buffers, behind:] = 0

    def _decide(
        self, put: BlockPut, block_hash: BlockHash, space: Space, *, exact: bool
    ) -> tuple[Admission, bool]:
        core, inventory = self._core, self._core.inventory
        slot_bytes = core.layout.slot_bytes
        if not space.total:
            return Admission.NO_DIRECTORY, False
        held = inventory.holds(block_hash) and (not exact or inventory.holds(block_hash, exact=True))
        if held or block_hash in core.queue.by_hash:
            inventory.touch([block_hash], core.time.now())
            return Admission.HELD, False
        if not put.running and not self._second_hit.admits(block_hash):
            return Admission.FIRST_SEEN, False
        if core.queue.full:
            return Admission.QUEUE_FULL, False
        answer, reserve = admit(
            space,
            core.policy,
            tenant=put.tenant,
            tenant_bytes=inventory.tenant_slots[put.tenant] * slot_bytes,
            slot_bytes=slot_bytes,
            running=put.running,
            nothing_may_go=core.nothing_may_go,
        )
        if answer is Admission.ACCEPTED and not self._budget.take(slot_bytes):
            return Admission.BUDGET, False
        return answer, reserve

    def _take(
        self, put: BlockPut, block_hash: BlockHash, serving: list[Directory], now: float, *, reserve: bool
    ) -> Pending:
        core = self._core
        allocated = core.inventory.allocate(serving)
        assert allocated is not None, "admitted without a free slot"
        pending = Pending(
            block_hash,
            put.tenant,
            put.root[:ID_BYTES],
            reserve,
            *allocated,
            core.queue.take_buffer(),
            accepted_at=now,
        )
        core.queue.announce(pending)
        core.inventory.count(put.tenant, reserve)
        return pending
