"""The door of the tier: what is let in, copied, and queued. Never waits for a disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from epdserve.kvstore.block_header import BlockHeader
from epdserve.kvstore.ssd.core import TierCore
from epdserve.kvstore.ssd.pacing import EnduranceBudget, SecondHit
from epdserve.kvstore.ssd.retention import Admission, Space, admit
from epdserve.kvstore.ssd.slots import is_aligned
from epdserve.kvstore.ssd.write_behind import ID_BYTES, BlockPut, Pending

MAY_PASS: Final = (Admission.QUEUE_FULL, Admission.NO_SPACE, Admission.QUOTA)  # after a pump or a sweep


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
        answers: list[Admission] = []
        taken: list[tuple[Pending, BlockPut]] = []
        try:
            with core.lock:
                space = core.inventory.space()
                for put in puts:
                    header = self._header(put)
                    answer, reserve = self._decide(put, header, space)
                    answers.append(answer)
                    if answer is Admission.ACCEPTED:
                        taken.append((self._take(put, header, reserve=reserve), put))
                        space = Space(space.total, space.free - 1, space.reserve_used + reserve)
                    elif answer in MAY_PASS:
                        break
        finally:
            for pending, put in taken:
                self._bring(pending, put, copy=copy)
            with core.lock:
                core.queue.enqueue([pending for pending, _ in taken])
            core.metrics.offered(answers)
        return answers

    def _header(self, put: BlockPut) -> BlockHeader:
        layout = self._core.layout
        header = BlockHeader.decode(put.page.data[layout.payload_bytes : layout.page_bytes])
        if header.payload_bytes != layout.payload_bytes:
            raise ValueError(f"blocks here have {layout.payload_bytes} bytes, got {header.payload_bytes}")
        return header

    def _bring(self, pending: Pending, put: BlockPut, *, copy: bool) -> None:
        queue, layout = self._core.queue, self._core.layout
        if copy or not layout.end_offset or not is_aligned(put.page):
            queue.buffers[pending.buffer][: layout.page_bytes] = put.page[: layout.page_bytes]
            return
        pending.page = put.page
        end = put.page.data[layout.end_offset : layout.page_bytes]
        queue.ends[pending.buffer].data[: len(end)] = end

    def _decide(self, put: BlockPut, header: BlockHeader, space: Space) -> tuple[Admission, bool]:
        core, inventory = self._core, self._core.inventory
        slot_bytes = core.layout.slot_bytes
        if not space.total:
            return Admission.NO_DIRECTORY, False
        block_hash = header.block_hash
        held = inventory.holds(block_hash) and (not header.exact or inventory.holds(block_hash, exact=True))
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

    def _take(self, put: BlockPut, header: BlockHeader, *, reserve: bool) -> Pending:
        core = self._core
        allocated = core.inventory.allocate()
        assert allocated is not None, "admitted without a free slot"
        directory, slot = allocated
        pending = Pending(
            header=header,
            parent=put.parent,
            tenant=put.tenant,
            root=put.root[:ID_BYTES],
            reserve=reserve,
            directory=directory,
            slot=slot,
            buffer=core.queue.take_buffer(),
            accepted_at=core.clock.monotonic(),
        )
        core.queue.announce(pending)
        core.inventory.count(put.tenant, reserve)
        return pending
