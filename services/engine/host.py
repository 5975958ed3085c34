"""What both kinds of workers stand on in their process: model, pools, transfer, metrics, facts for heartbeats."""

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from epdserve.kvstore.clock import Clock, SystemClock
from epdserve.kvstore.errors import TransferUnavailable
from epdserve.kvstore.metrics import BlockMetrics, SlotMetrics, TransferMetrics
from epdserve.kvstore.transfer.nixl import NixlTransfer
from epdserve.kvstore.types import MemoryRegion
from epdserve.model.backbone import Backbone
from epdserve.model.errors import ModelError
from epdserve.services.engine.config import EngineSettings
from epdserve.services.engine.endpoint import to_wire
from epdserve.services.engine.metrics import EngineMetrics
from epdserve.services.engine.runner import Runner
from epdserve.services.engine.seat import Seat
from epdserve.services.errors import Unavailable
from epdserve.services.observability.metrics import MetricsServer, new_registry
from epdserve.services.store_types import CacheTier
from epdserve.services.types import WIRE_VERSION, TransferEndpoint, WorkerInfo, WorkerState
from prometheus_client import CollectorRegistry


@dataclass(frozen=True, slots=True)
class Load:
    """What changes between two heartbeats; speeds by tier of the store, of those measured lately."""

    queued_tokens: int
    running: int
    step_age_s: float
    fetch_bytes_per_s: Mapping[str, float]


class EngineHost:
    """Everything of a worker that has no thread and no event loop of its own.

    Attributes:
        runner: Of the step loop.
        transfer: With the runner's memory registered; belongs to the transfer thread once that is started.
        registry: All metrics of the process.
    """

    def __init__(
        self,
        settings: EngineSettings,
        seat: Seat,
        *,
        clock: Clock | None = None,
        registry: CollectorRegistry | None = None,
        regions: Sequence[MemoryRegion] = (),
    ) -> None:
        """Load the model and take the memory; takes as long as the weights are big.

        Args:
            registry: Of the process's metrics, if there is one already.
            regions: Memory of the role's own that transfers may use.

        Raises:
            Unavailable: The model directory, the transport or the metrics port cannot be used.
        """
        torch.set_num_threads(settings.threads)
        self.settings, self.seat = settings, seat
        self.clock: Clock = clock or SystemClock()
        self.registry: CollectorRegistry = registry or new_registry()
        self.metrics = EngineMetrics(self.registry)
        block_metrics, transfer_metrics = BlockMetrics(self.registry), TransferMetrics(self.registry)
        self.runner = _open_runner(settings, self.clock, block_metrics)
        block_metrics.watch(self.runner.blocks, page_bytes=self.runner.layout.page_bytes)
        self.slot_metrics = SlotMetrics(self.registry)
        self.slot_metrics.watch("state", self.runner.state_slots.counts)
        self.slot_metrics.watch("staging", self.runner.staging_slots.counts)
        try:
            self.transfer = NixlTransfer(
                seat.worker, loopback_only=_is_loopback(seat.host), metrics=transfer_metrics
            )
            for region in (*self.runner.regions(), *regions):
                self.transfer.register(region)
        except TransferUnavailable as error:
            raise Unavailable(str(error)) from error
        transfer_metrics.watch(self.transfer.pending)
        self.endpoint: TransferEndpoint = to_wire(self.transfer.endpoint())
        self._metrics_server = MetricsServer(self.registry, address=f"{seat.host}:{seat.metrics_port}")

    @property
    def metrics_address(self) -> str:
        """``host:port`` of ``/metrics``."""
        return self._metrics_server.address

    def info(self, load: Load, *, address: str, state: WorkerState, max_context_tokens: int) -> WorkerInfo:
        """The facts of this moment."""
        return WorkerInfo(
            worker=self.seat.worker,
            role=self.seat.role,
            incarnation=self.seat.incarnation,
            address=address,
            metrics_address=self.metrics_address,
            state=state,
            cache_root=self.runner.names.root,
            deterministic_root=self.runner.deterministic_names.root,
            block_tokens=self.runner.block_tokens,
            max_context_tokens=max_context_tokens,
            queued_tokens=load.queued_tokens,
            running=load.running,
            free_pages=self.runner.blocks.available(),
            total_pages=self.runner.num_pages,
            step_age_s=load.step_age_s,
            host_bytes_per_s=load.fetch_bytes_per_s.get(CacheTier.HOST.value, 0.0),
            ssd_bytes_per_s=load.fetch_bytes_per_s.get(CacheTier.SSD.value, 0.0),
            peer_bytes_per_s=load.fetch_bytes_per_s.get(CacheTier.PEER.value, 0.0),
            wire_version=WIRE_VERSION,
            model_name=self.settings.model_dir.name,
        )

    def leaked_pages(self, idle: Callable[[], bool]) -> Callable[[], float]:
        """Reader of the leak gauge: what is held while ``idle`` says that nothing may be."""
        return lambda: float(self.runner.leaked_pages()) if idle() else 0.0

    def close(self) -> None:
        """Stop serving metrics; the transfer is closed by its thread."""
        self._metrics_server.close()


def _open_runner(settings: EngineSettings, clock: Clock, block_metrics: BlockMetrics) -> Runner:
    try:
        backbone = Backbone.load(settings.model_dir, precision=settings.precision, device=settings.device)
        return Runner(backbone, settings, clock=clock, block_metrics=block_metrics)
    except (ModelError, OSError, ValueError) as error:
        raise Unavailable(f"model {settings.model_dir}: {error}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
