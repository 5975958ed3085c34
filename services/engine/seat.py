"""Who a worker is and where it listens."""

from dataclasses import dataclass, field

from epdserve.services.types import WorkerRole


@dataclass(frozen=True, slots=True)
class Seat:
    """One life of a worker.

    Attributes:
        host: Address to bind to; ports are free ones.
        cluster_token: Wanted on every call, sent with every call.
    """

    worker: str
    incarnation: str
    role: WorkerRole
    host: str
    cluster_token: str = field(repr=False)
