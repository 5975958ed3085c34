"""Who a worker is and where it listens."""

from dataclasses import dataclass, field

from epdserve.services.types import WorkerRole


@dataclass(frozen=True, slots=True)
class Seat:
    """One life of a worker.

    Attributes:
        host: Address to bind to.
        cluster_token: Wanted on every call, sent with every call.
        port: Of the gRPC server; 0 takes a free one.
        metrics_port: Likewise, of ``/metrics``.
    """

    worker: str
    incarnation: str
    role: WorkerRole
    host: str
    cluster_token: str = field(repr=False)
    port: int = 0
    metrics_port: int = 0
