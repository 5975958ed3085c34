"""Chooses where a page's checksum is computed: in native host code for pools in host memory, else in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from epdserve.kernels.checksum.host import page_checksums_host
from epdserve.kernels.checksum.reference import page_checksums_ref
from torch import Tensor


def page_checksums(
    pages_PB: Tensor, page_ids: Sequence[int], payload_bytes: int, hashes: Sequence[bytes]
) -> list[int]:
    """As ``page_checksums_ref``, whose numbers it gives; arguments and result as there."""
    if pages_PB.device.type == "cpu" and pages_PB.is_contiguous():
        return page_checksums_host(pages_PB.detach().numpy(), page_ids, payload_bytes, hashes)
    return page_checksums_ref(pages_PB, page_ids, payload_bytes, hashes)
