"""Peak rates of the GPUs that kernels are compiled for: what the vendors' data sheets say, dense (without sparsity).

H200 SXM: NVIDIA H200 Tensor Core GPU data sheet. B200: NVIDIA HGX B200 data sheet, an eighth of eight GPUs.
MI300X: AMD Instinct MI300X data sheet. float32 is that of the vector units; a matrix product in float32 runs there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from epdserve.kernels.catalogue import Rate, Work


@dataclass(frozen=True, slots=True)
class Device:
    """Bytes per second of its memory, and FLOP/s by arithmetic unit."""

    name: str
    target: str
    bytes_per_s: float
    flops: dict[Rate, float]

    def roofline_us(self, work: Work) -> float:
        """Microseconds that the call cannot undercut: memory or arithmetic, whichever takes longer."""
        return 1e6 * max(work.bytes_moved / self.bytes_per_s, work.flops / self.flops[work.rate])


DEVICES: Final = (
    Device("H200", "sm_90", 4.8e12, {"fp32": 67e12, "tf32": 495e12, "bf16": 989e12, "fp8": 1979e12}),
    Device("B200", "sm_100", 8.0e12, {"fp32": 75e12, "tf32": 1125e12, "bf16": 2250e12, "fp8": 4500e12}),
    Device("MI300X", "gfx942", 5.3e12, {"fp32": 163e12, "tf32": 654e12, "bf16": 1307e12, "fp8": 2615e12}),
)
