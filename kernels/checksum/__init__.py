"""Position-weighted 64-bit checksums of pages, in torch and in numpy."""

from epdserve.kernels.checksum import reference as _reference
from epdserve.kernels.checksum.twin import page_checksums_numpy

checksum_weights = _reference.checksum_weights_ref
page_checksums = _reference.page_checksums_ref

__all__ = [
    "checksum_weights",
    "page_checksums",
    "page_checksums_numpy",
]
