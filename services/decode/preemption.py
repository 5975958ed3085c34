"""Preempted requests in host memory: sealed blocks and a tail record. Nothing is lost, nothing computed twice.

Memory for it is bounded. A request that does not fit is computed again from its tokens instead: slower, not shorter.
"""

from dataclasses import dataclass

import torch
from epdserve.kvstore.errors import OutOfPages
from epdserve.kvstore.types import BlockInfo, PageId
from epdserve.services.engine.requests import RunningRequest
from epdserve.services.engine.runner import Filled, Runner


@dataclass(frozen=True, slots=True, eq=False)
class Swapped:
    """A request's state: pages (blocks, page bytes) and tail record (tail bytes,), both uint8 in host memory."""

    blocks: tuple[BlockInfo, ...]
    pages: torch.Tensor
    record: torch.Tensor
    checksum: int

    @property
    def nbytes(self) -> int:
        """Host memory held."""
        return self.pages.numel() + self.record.numel()


class SwapSpace:
    """Moves requests out of a runner's pools and back. Not thread-safe, owned by the step loop."""

    def __init__(self, runner: Runner, *, limit_bytes: int) -> None:
        self._runner, self._limit_bytes = runner, limit_bytes
        self.used_bytes = 0

    def move_out(self, request: RunningRequest) -> Swapped | None:
        """Free all that a request holds in the pools; None, with nothing kept, if there is no room for its state.

        Nor are full blocks kept that nobody may share: a deterministic request runs its generated tokens again.
        """
        runner = self._runner
        unshared = request.next_row // runner.block_tokens > request.sealed_blocks
        nbytes = request.sealed_blocks * runner.layout.page_bytes + runner.tail_layout.nbytes
        swapped = None
        if self.used_bytes + nbytes <= self._limit_bytes and not unshared:
            pages = request.pages[: request.sealed_blocks]
            record = torch.empty(runner.tail_layout.nbytes, dtype=torch.uint8)
            checksum = runner.write_tail(request, record, None)
            copied = runner.pools.pages[torch.tensor(pages, dtype=torch.int64)].to("cpu")
            infos = tuple(runner.blocks.describe_all(pages))
            swapped = Swapped(infos, copied, record, checksum)
            self.used_bytes += swapped.nbytes
        runner.release(request)
        return swapped

    def move_in(self, request: RunningRequest, swapped: Swapped) -> bool:
        """Restore a request exactly as it was; False, and no change, if there is no room."""
        runner = self._runner
        slot = runner.state_slots.acquire()
        if slot is None:
            return False
        own = self._still_held(swapped)
        missing = -(-request.length // runner.block_tokens) - len(own)
        try:
            fresh = runner.blocks.reserve(missing)
        except OutOfPages:
            runner.blocks.release(own)
            runner.state_slots.release(slot)
            return False
        request.slot, request.pages, request.sealed_blocks = slot, own + fresh, len(own)
        returning = torch.tensor(request.pages[len(own) : len(swapped.blocks)], dtype=torch.int64)
        runner.pools.pages[returning] = swapped.pages[len(own) :].to(runner.backbone.device)
        self._seal_again(request, swapped)
        exact = request.is_exact(request.next_row)
        runner.restore_tail(request, swapped.record, checksum=swapped.checksum, exact=exact)
        self.forget(swapped)
        return True

    def forget(self, swapped: Swapped) -> None:
        """Give a swapped state's memory back."""
        self.used_bytes -= swapped.nbytes

    def _still_held(self, swapped: Swapped) -> list[PageId]:
        """Leading pages that are still cached with the very same bytes, referenced."""
        blocks = self._runner.blocks
        pages = blocks.match([info.block_hash for info in swapped.blocks], exact=False)
        same = 0
        while same < len(pages) and blocks.describe(pages[same]).checksum == swapped.blocks[same].checksum:
            same += 1
        blocks.release(pages[same:])
        return pages[:same]

    def _seal_again(self, request: RunningRequest, swapped: Swapped) -> None:
        """Share the restored blocks; from one on whose name now stands for other bytes, the request is private."""
        for info in swapped.blocks[request.sealed_blocks :]:
            if self._runner.holds_other_bytes(info.block_hash, info.checksum):
                request.private = True
                return
            self._runner.seal_next(request, [Filled(info.checksum, info.exact)])
