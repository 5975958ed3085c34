"""Lists of places to few long spans. Pure, and in arrays: one hand-off names hundreds of places.

A transport pays for every descriptor, and one long copy beats many short ones, so neighbours on both sides are joined.
Spans are then cut into batches of limited size, so that a transport that copies inside its call gives way to other
threads between two batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from epdserve.kvstore.transfer.base import Copy
from epdserve.kvstore.types import HOST_MEMORY, RegionDescriptor

Ints = npt.NDArray[np.int64]


class Place(NamedTuple):
    """One contiguous copy in plain addresses."""

    remote_device: int
    local_device: int
    remote_address: int
    local_address: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Contiguous copies in plain addresses, between one pair of devices. Arrays of one length."""

    remote_device: int
    local_device: int
    remote_addresses: Ints
    local_addresses: Ints
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.nbytes)

    def rows(self) -> list[tuple[int, int, int]]:
        """(remote address, local address, bytes) of each."""
        columns = (self.remote_addresses.tolist(), self.local_addresses.tolist(), self.nbytes.tolist())
        return list(zip(*columns, strict=True))

    def take(self, index: Ints | slice) -> Spans:
        """Some of them."""
        columns = (self.remote_addresses[index], self.local_addresses[index], self.nbytes[index])
        return Spans(self.remote_device, self.local_device, *columns)


def resolve(
    copies: Sequence[Copy], remote: Mapping[str, RegionDescriptor], local: Mapping[str, RegionDescriptor]
) -> list[Spans]:
    """Turn places into addresses, checking each against its region; spans come by pair of devices.

    Raises:
        ValueError: A region, an index or a length that does not exist on its side, or destinations that overlap.
    """
    if not copies:
        return []
    remote_names, remote_indices, local_names, local_indices, lengths = zip(*copies, strict=True)
    nbytes = np.array(lengths, np.int64)
    remote_addresses, remote_devices = _places(remote, remote_names, remote_indices, nbytes, "remote")
    local_addresses, local_devices = _places(local, local_names, local_indices, nbytes, "local")
    _refuse_overlaps(local_devices, local_addresses, nbytes)
    if (remote_devices == remote_devices[0]).all() and (local_devices == local_devices[0]).all():
        pair = int(remote_devices[0]), int(local_devices[0])
        return [Spans(*pair, remote_addresses, local_addresses, nbytes)]
    spans = []
    for remote_device, local_device in sorted(
        set(zip(remote_devices.tolist(), local_devices.tolist(), strict=True))
    ):
        chosen = (remote_devices == remote_device) & (local_devices == local_device)
        columns = (remote_addresses[chosen], local_addresses[chosen], nbytes[chosen])
        spans.append(Spans(remote_device, local_device, *columns))
    return spans


def resolve_one(
    copy: Copy, remote: Mapping[str, RegionDescriptor], local: Mapping[str, RegionDescriptor]
) -> Place:
    """``resolve`` of a single copy: arrays would cost more than the copy of a small place.

    Raises:
        ValueError: As ``resolve``.
    """
    source = _region(remote, copy.remote_region, copy.remote_index, copy.nbytes, "remote")
    target = _region(local, copy.local_region, copy.local_index, copy.nbytes, "local")
    return Place(
        source.device_id,
        target.device_id,
        source.address + copy.remote_index * source.stride,
        target.address + copy.local_index * target.stride,
        copy.nbytes,
    )


def coalesce(spans: Spans) -> Spans:
    """Join spans that are neighbours on both sides. The result is in order of remote address."""
    if len(spans) == 1:
        return spans
    ordered = spans.take(np.lexsort((spans.local_addresses, spans.remote_addresses)))
    starts = np.ones(len(ordered), bool)
    starts[1:] = (_ends(ordered.remote_addresses, ordered) != ordered.remote_addresses[1:]) | (
        _ends(ordered.local_addresses, ordered) != ordered.local_addresses[1:]
    )
    first = np.flatnonzero(starts)
    joined = ordered.take(first)
    return Spans(
        spans.remote_device,
        spans.local_device,
        joined.remote_addresses,
        joined.local_addresses,
        np.add.reduceat(ordered.nbytes, first),
    )


def batches(spans: Spans, *, max_bytes: int, max_spans: int) -> Iterator[Spans]:
    """Cut spans, of at least a byte each, into batches of at most ``max_bytes`` bytes and ``max_spans`` spans."""
    if len(spans) == 1 and spans.nbytes[0] <= max_bytes:
        yield spans
        return
    pieces = _pieces(spans, max_bytes)
    ends = np.cumsum(pieces.nbytes)
    start = 0
    while start < len(pieces):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + max_bytes, side="right"))
        stop = min(stop, start + max_spans)
        yield pieces.take(slice(start, stop))
        start = stop


def _places(
    regions: Mapping[str, RegionDescriptor],
    names: Sequence[str],
    indices: Sequence[int],
    nbytes: Ints,
    side: str,
) -> tuple[Ints, Ints]:
    """Address and device of each place."""
    index = np.array(indices, np.int64)
    if names.count(names[0]) == len(names):  # the usual case
        for extreme in (index.argmin(), index.argmax(), nbytes.argmin(), nbytes.argmax()):
            region = _region(regions, names[0], int(index[extreme]), int(nbytes[extreme]), side)
        return region.address + index * region.stride, np.full(len(index), region.device_id, np.int64)
    addresses, devices = np.empty(len(index), np.int64), np.full(len(index), HOST_MEMORY, np.int64)
    which = np.array(names)
    for name in sorted(set(names)):
        chosen = which == name
        of_region, sizes = index[chosen], nbytes[chosen]
        for extreme in (of_region.argmin(), of_region.argmax(), sizes.argmin(), sizes.argmax()):
            region = _region(regions, name, int(of_region[extreme]), int(sizes[extreme]), side)
        addresses[chosen] = region.address + index[chosen] * region.stride
        devices[chosen] = region.device_id
    return addresses, devices


def _region(
    regions: Mapping[str, RegionDescriptor], name: str, index: int, nbytes: int, side: str
) -> RegionDescriptor:
    """The region of that name, with this place of that length in it."""
    region = regions.get(name)
    if region is None:
        raise ValueError(f"no {side} region {name!r}; there are {sorted(regions)}")
    if not 0 <= index < region.count:
        raise ValueError(f"{side} region {name!r} has places 0..{region.count - 1}, got {index}")
    if not 0 < nbytes <= region.stride:
        raise ValueError(f"{side} region {name!r} has places of {region.stride} bytes, got {nbytes}")
    return region


def _refuse_overlaps(devices: Ints, addresses: Ints, nbytes: Ints) -> None:
    order = np.lexsort((addresses, devices))
    devices, addresses, ends = devices[order], addresses[order], (addresses + nbytes)[order]
    overlap = (devices[1:] == devices[:-1]) & (ends[:-1] > addresses[1:])
    if overlap.any():
        raise ValueError(f"two copies into address {int(addresses[1:][overlap][0])}")


def _ends(addresses: Ints, spans: Spans) -> Ints:
    """Where each but the last ends."""
    return addresses[:-1] + spans.nbytes[:-1]


def _pieces(spans: Spans, max_bytes: int) -> Spans:
    """The same bytes in spans of at most ``max_bytes``."""
    counts = -(-spans.nbytes // max_bytes)
    if (counts <= 1).all():
        return spans
    of = np.repeat(np.arange(len(spans)), counts)
    offset = (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)) * max_bytes
    return Spans(
        spans.remote_device,
        spans.local_device,
        spans.remote_addresses[of] + offset,
        spans.local_addresses[of] + offset,
        np.minimum(spans.nbytes[of] - offset, max_bytes),
    )
