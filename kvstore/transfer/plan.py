"""Lists of places to few long spans. Pure.

A transport pays for every descriptor, and one long copy beats many short ones, so neighbours on both sides are joined.
Spans are then cut into batches of limited size, so that a transport that copies inside its call gives way to other
threads between two batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from epdserve.kvstore.transfer.base import Copy
from epdserve.kvstore.types import RegionDescriptor


@dataclass(frozen=True, slots=True)
class Span:
    """One contiguous copy in plain addresses."""

    remote_address: int
    local_address: int
    nbytes: int
    remote_device: int
    local_device: int

    @property
    def devices(self) -> tuple[int, int]:
        """(remote, local) device."""
        return self.remote_device, self.local_device


def resolve(
    copies: Iterable[Copy], remote: Mapping[str, RegionDescriptor], local: Mapping[str, RegionDescriptor]
) -> list[Span]:
    """Turn places into addresses, checking each against its region.

    Raises:
        ValueError: A region, an index or a length that does not exist on its side, or destinations that overlap.
    """
    spans = []
    for copy in copies:
        source = _place(remote, copy.remote_region, copy.remote_index, copy.nbytes, "remote")
        target = _place(local, copy.local_region, copy.local_index, copy.nbytes, "local")
        spans.append(Span(source[0], target[0], copy.nbytes, source[1], target[1]))
    by_target = sorted(spans, key=lambda span: (span.local_device, span.local_address))
    for before, after in pairwise(by_target):
        if (
            before.local_device == after.local_device
            and before.local_address + before.nbytes > after.local_address
        ):
            raise ValueError(f"two copies into address {after.local_address}")
    return spans


def coalesce(spans: Iterable[Span]) -> list[Span]:
    """Join spans that are neighbours on both sides. The result is in order of remote address."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.devices, s.remote_address, s.local_address)):
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.devices == span.devices
            and last.remote_address + last.nbytes == span.remote_address
            and last.local_address + last.nbytes == span.local_address
        ):
            joined[-1] = Span(
                last.remote_address, last.local_address, last.nbytes + span.nbytes, *span.devices
            )
        else:
            joined.append(span)
    return joined


def batches(spans: Sequence[Span], *, max_bytes: int, max_spans: int) -> Iterator[list[Span]]:
    """Cut spans into batches of one pair of devices, at most ``max_bytes`` bytes and ``max_spans`` spans each."""
    by_devices: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in spans:
        by_devices[span.devices].append(span)
    for group in by_devices.values():
        batch: list[Span] = []
        room = max_bytes
        for piece in _pieces(group, max_bytes):
            if batch and (piece.nbytes > room or len(batch) == max_spans):
                yield batch
                batch, room = [], max_bytes
            batch.append(piece)
            room -= piece.nbytes
        if batch:
            yield batch


def _place(
    regions: Mapping[str, RegionDescriptor], name: str, index: int, nbytes: int, side: str
) -> tuple[int, int]:
    region = regions.get(name)
    if region is None:
        raise ValueError(f"no {side} region {name!r}; there are {sorted(regions)}")
    if not 0 <= index < region.count:
        raise ValueError(f"{side} region {name!r} has places 0..{region.count - 1}, got {index}")
    if not 0 < nbytes <= region.stride:
        raise ValueError(f"{side} region {name!r} has places of {region.stride} bytes, got {nbytes}")
    return region.address + index * region.stride, region.device_id


def _pieces(spans: Iterable[Span], max_bytes: int) -> Iterator[Span]:
    for span in spans:
        for offset in range(0, span.nbytes, max_bytes):
            nbytes = min(max_bytes, span.nbytes - offset)
            yield Span(span.remote_address + offset, span.local_address + offset, nbytes, *span.devices)
