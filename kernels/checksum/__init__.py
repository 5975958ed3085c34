"""Position-weighted 64-bit checksums of pages: in torch, in numpy, and in native code for hosts."""

from epdserve.kernels.checksum import reference as _reference
from epdserve.kernels.checksum.dispatch import page_checksums
from epdserve.kernels.checksum.host import (
    HOST_CHECKSUM_KERNEL,
    HostChecksum,
    host_checksum,
    page_checksums_host,
)
from epdserve.kernels.checksum.twin import page_checksums_numpy

checksum_weights = _reference.checksum_weights_ref

__all__ = [
    "HOST_CHECKSUM_KERNEL",
    "HostChecksum",
    "checksum_weights",
    "host_checksum",
    "page_checksums",
    "page_checksums_host",
    "page_checksums_numpy",
]
