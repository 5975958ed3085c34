"""The step loop's half of a hand-off: places for what comes, and what becomes of them when the pull has ended.

Bytes are trusted only if every block and the tail carry the hash and the checksum that the handle promised, and the
lease still held after the read. Destinations of a transfer that is not over are quarantined, never reused.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from epdserve.kvstore.errors import OutOfPages
from epdserve.kvstore.slots import Slot
from epdserve.kvstore.transfer.base import Copy
from epdserve.kvstore.types import PageId
from epdserve.model.errors import TailError
from epdserve.services.decode.pulling import Pull, PullDriver, PullOutcome
from epdserve.services.engine.requests import RunningRequest
from epdserve.services.engine.runner import PAGES, TAILS, Filled, Runner
from epdserve.services.engine.transfer_thread import TransferThread
from epdserve.services.engine.verifying import wrong_blocks
from epdserve.services.types import BlockRef, KVHandle

log = logging.getLogger(__name__)


class HandleRefused(Exception):  # noqa: N818 - what happened, in the words of the metric
    """A handle that does not fit this worker or this prompt; the tokens are recomputed."""


@dataclass(slots=True, eq=False)
class Arrival:
    """A request whose KV is on its way.

    Attributes:
        own_blocks: Blocks found here.
        pulled: The others, in order; their pages and the staging slot are destinations of the transfer.
        exit_D: (hidden,) exit vector that came with the tail.
    """

    request: RunningRequest
    handle: KVHandle
    staging: Slot
    own_blocks: int
    pulled: tuple[BlockRef, ...]
    pull: Pull | None = None
    exit_D: torch.Tensor | None = None


class Ingest:
    """Starts and ends hand-offs. Owned by the step loop, not thread-safe."""

    def __init__(self, runner: Runner, transfers: TransferThread, driver: PullDriver) -> None:
        self._runner, self._transfers, self._driver = runner, transfers, driver

    def begin(
        self, request: RunningRequest, handle: KVHandle, on_end: Callable[[PullOutcome], None]
    ) -> Arrival | None:
        """Take places and start pulling; None, and no change, if there is no room now.

        Args:
            request: Stands at no row yet; gets pages and a state slot.
            handle: From the prefill worker, by way of the router: believed only as far as it can be checked.
            on_end: Called on the event loop once; then ``end`` must be called in the step loop.

        Raises:
            HandleRefused: Nothing was changed.
        """
        runner = self._runner
        hashes = runner.chain_of(request)[: request.prompt_tokens // runner.block_tokens]
        self._check(handle, request, hashes)
        staging, slot = runner.staging_slots.acquire(), runner.state_slots.acquire()
        own = runner.blocks.match(hashes, exact=request.exact)
        try:
            if staging is None or slot is None:
                raise OutOfPages(1, 0)
            # one place beyond the prompt, so that the first sampled token can be run
            fresh = runner.blocks.reserve(-(-(request.length + 1) // runner.block_tokens) - len(own))
        except OutOfPages:
            runner.blocks.release(own)
            if staging is not None:
                runner.staging_slots.release(staging)
            if slot is not None:
                runner.state_slots.release(slot)
            return None
        request.slot, request.hashes = slot, hashes
        request.pages, request.sealed_blocks = own + fresh, len(own)
        arrival = Arrival(request, handle, staging, len(own), handle.blocks[len(own) :])
        arrival.pull = Pull(
            handle, self._copies(arrival), lambda: self._verify(arrival), lambda _, outcome: on_end(outcome)
        )
        self._driver.start(arrival.pull)
        return arrival

    def cancel(self, arrival: Arrival) -> None:
        """End a pull early; its ``on_end`` still comes."""
        assert arrival.pull is not None
        self._driver.cancel(arrival.pull)

    def end(self, arrival: Arrival, outcome: PullOutcome) -> PullOutcome:
        """Put the request in place if the pull is DONE, else take everything from it; returns the final outcome."""
        if outcome is PullOutcome.DONE:
            try:
                arrival.exit_D = self._restore(arrival)
            except TailError as error:
                log.warning("tail refused", extra={"peer": arrival.handle.worker, "error": str(error)})
                outcome = PullOutcome.CORRUPT
        if outcome is PullOutcome.DONE:
            self._runner.staging_slots.release(arrival.staging)
        else:
            self._give_up(arrival)
        return outcome

    def _check(self, handle: KVHandle, request: RunningRequest, hashes: Sequence[bytes]) -> None:
        if handle.tokens != request.prompt_tokens:
            raise HandleRefused(f"handle of {handle.tokens} tokens for a prefill of {request.prompt_tokens}")
        if [ref.block_hash for ref in handle.blocks] != list(hashes):
            raise HandleRefused("the handle's blocks are not those of the prompt")
        if handle.tail.nbytes != self._runner.tail_layout.nbytes:
            raise HandleRefused(
                f"a tail has {self._runner.tail_layout.nbytes} bytes, not {handle.tail.nbytes}"
            )
        if request.exact and not (handle.tail.exact and all(ref.exact for ref in handle.blocks)):
            raise HandleRefused("tainted KV for an exact request")

    def _pulled_pages(self, arrival: Arrival) -> list[PageId]:
        return arrival.request.pages[arrival.own_blocks : len(arrival.handle.blocks)]

    def _copies(self, arrival: Arrival) -> list[Copy]:
        page_bytes = self._runner.layout.page_bytes
        pages = zip(arrival.pulled, self._pulled_pages(arrival), strict=True)
        copies = [Copy(PAGES, ref.page, PAGES, page, page_bytes) for ref, page in pages]
        tail = arrival.handle.tail
        return [*copies, Copy(TAILS, tail.slot, TAILS, arrival.staging.index, tail.nbytes)]

    def _verify(self, arrival: Arrival) -> bool:
        """Compare the pulled blocks with the handle. Not in the step loop: it only reads."""
        wrong = wrong_blocks(self._runner, self._pulled_pages(arrival), arrival.pulled)
        if wrong:
            told = {"peer": arrival.handle.worker, "blocks": len(wrong), "of": len(arrival.pulled)}
            log.warning("blocks refused", extra=told)
        return not wrong

    def _restore(self, arrival: Arrival) -> torch.Tensor | None:
        """Tail into the state slot and the open page, then share the pulled blocks.

        Raises:
            TailError: The tail's bytes are not the promised ones.
        """
        runner, request = self._runner, arrival.request
        request.next_row = request.prompt_tokens
        tail = arrival.handle.tail
        exit_D = runner.restore_tail(
            request,
            runner.staging[arrival.staging.index],
            checksum=tail.checksum,
            exact=tail.exact,
            has_exit=True,
        )
        runner.seal_next(request, [Filled(ref.checksum, ref.exact) for ref in arrival.pulled])
        tainted_from = len(arrival.handle.blocks) * runner.block_tokens
        request.tainted_from = None if arrival.handle.tail.exact else tainted_from
        return (
            None if request.remaining_rows else exit_D
        )  # delivered tokens are run before the next one is drawn

    def _give_up(self, arrival: Arrival) -> None:
        runner, request = self._runner, arrival.request
        pages, staging = self._pulled_pages(arrival), arrival.staging
        read = arrival.pull.read if arrival.pull is not None else None
        if read is not None and not read.over:
            runner.blocks.quarantine(pages)
            runner.staging_slots.quarantine(staging)

            def over() -> None:
                runner.blocks.transfer_over(pages)
                runner.staging_slots.transfer_over(staging)

            if self._transfers.settle(read, over):
                over()
            del request.pages[arrival.own_blocks : len(arrival.handle.blocks)]
        else:
            runner.staging_slots.release(staging)
        runner.release(request)
        request.next_row = 0
