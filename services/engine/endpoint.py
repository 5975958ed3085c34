"""A worker's transfer endpoint in the words of ``services`` and in those of ``kvstore``."""

from epdserve.kvstore.types import Endpoint, RegionDescriptor
from epdserve.services.errors import InvalidRequest
from epdserve.services.types import TransferEndpoint, TransferRegion


def to_wire(endpoint: Endpoint) -> TransferEndpoint:
    """What a worker tells its peers."""
    regions = tuple(
        TransferRegion(r.name, r.address, r.stride, r.count, r.device_id) for r in endpoint.regions
    )
    return TransferEndpoint(endpoint.agent, endpoint.metadata, regions)


def from_wire(endpoint: TransferEndpoint) -> Endpoint:
    """What a peer told.

    Raises:
        InvalidRequest: A region that cannot exist.
    """
    try:
        regions = tuple(
            RegionDescriptor(r.name, r.address, r.stride, r.count, r.device_id) for r in endpoint.regions
        )
    except ValueError as error:
        raise InvalidRequest(f"endpoint of {endpoint.agent!r}: {error}") from error
    return Endpoint(endpoint.agent, endpoint.metadata, regions)
