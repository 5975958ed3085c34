"""Everything a worker does with the store of its machine, put together once."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from epdserve.services.engine.config import StoreUse
from epdserve.services.engine.offload import Offloader
from epdserve.services.engine.preparing import Prepared, Preparer
from epdserve.services.engine.requests import RunningRequest
from epdserve.services.engine.runner import Runner
from epdserve.services.engine.seat import Seat
from epdserve.services.engine.speeds import SpeedMeter
from epdserve.services.engine.step_loop import StepLoop
from epdserve.services.engine.store_link import StoreLink
from epdserve.services.engine.store_metrics import StoreMetrics
from epdserve.services.engine.transfer_thread import TransferThread
from epdserve.services.errors import Overloaded, Unavailable
from epdserve.services.types import WorkerInfo, WorkerRole

_AGAIN_S: Final = 0.05  # when the step loop's queue is full


class StoreDesk:
    """Created, started and stopped on the event loop; ``prepare`` and ``cancel`` may be called from any thread.

    Args:
        find: The store of this machine as the registry has it now; quick, may be called from any thread.
        steps: Where requests go once they are prepared.
        handing_off: Whether a decode worker may be reading this worker's memory.

    Attributes:
        offloader: For the step loop; None if the settings leave the store out.
        speeds: What the links and the model do.
    """

    def __init__(
        self,
        runner: Runner,
        transfers: TransferThread,
        steps: StepLoop,
        find: Callable[[], WorkerInfo | None],
        *,
        seat: Seat,
        use: StoreUse,
        metrics: StoreMetrics,
        handing_off: Callable[[], bool],
    ) -> None:
        self._runner, self._steps = runner, steps
        self._find = find if use.enabled else lambda: None
        self.speeds = SpeedMeter(runner.clock)
        self._link = StoreLink(
            self._find,
            token=seat.cluster_token,
            page_bytes=runner.layout.page_bytes,
            tail_bytes=runner.tail_layout.nbytes,
            clock=runner.clock,
        )
        offloader = Offloader(
            runner,
            self._link,
            use,
            worker=seat.worker,
            incarnation=seat.incarnation,
            running=seat.role is WorkerRole.DECODE,
            on_call=transfers.wake,
            metrics=metrics,
            handing_off=handing_off,
        )
        self._offloader = offloader
        self.offloader = offloader if use.enabled else None
        self._preparer = Preparer(
            runner, transfers, self._link, use, offloader, speeds=self.speeds, metrics=metrics
        )
        metrics.watch(
            pending_bytes=lambda: offloader.pending_bytes, preparing=lambda: self._preparer.preparing
        )

    @property
    def busy(self) -> bool:
        """Whether the store may be reading this worker's memory."""
        return self._offloader.busy

    @property
    def idle(self) -> bool:
        """Whether nothing of this worker is held for the store, or by requests that are being prepared."""
        return not self._offloader.pending_bytes and not self._preparer.preparing

    def start(self) -> None:
        """Begin to offer what is sealed."""
        if self.offloader is not None:
            self._runner.on_sealed = self.offloader.offer_blocks
            self.offloader.start()

    async def flush(self, *, deadline_s: float) -> None:
        """Wait for offers to reach the store, or for the deadline."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while self._offloader.pending_bytes and self._find() is not None:  # noqa: ASYNC110
                    await asyncio.sleep(_AGAIN_S)

    def forget_offers(self) -> None:
        """Drop what waits to be offered to the store."""
        self._offloader.drop_queued()

    async def stop(self) -> None:
        """Stop bringing up and offering; what was held for it is given back. The step loop still runs."""
        await self._preparer.stop()
        await self._offloader.stop()
        await self._link.close()

    def prepare(self, request: RunningRequest, then: Callable[[Prepared], None]) -> bool:
        """Begin to bring up what the store has of a request; False if there is no store, and then nothing follows.

        Args:
            request: Has no place yet.
            then: Run in the step loop once it is done; gives back what it does not want.
        """
        if self._find() is None:
            return False
        self._preparer.start(request, lambda prepared: self._hand_in(prepared, then))
        return True

    def cancel(self, request: RunningRequest) -> None:
        """Bring up no more; what follows ``prepare`` follows at once."""
        self._preparer.cancel(request)

    def _hand_in(self, prepared: Prepared, then: Callable[[Prepared], None]) -> None:
        """On the event loop."""
        try:
            self._steps.submit(lambda: then(prepared))
        except Overloaded:
            self._preparer.loop.call_later(_AGAIN_S, self._hand_in, prepared, then)
        except Unavailable:  # the loop has ended, and with it every request
            if prepared.tail is not None:
                self._runner.staging_slots.release(prepared.tail.staging)
                prepared.tail = None
