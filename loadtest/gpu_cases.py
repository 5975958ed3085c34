"""Every kernel's case: the families' makers in one list."""

from __future__ import annotations

from collections.abc import Iterator

from epdserve.loadtest import gpu_cases_attention, gpu_cases_linear, gpu_cases_rows
from epdserve.loadtest.gpu_case import CaseMaker
from epdserve.loadtest.gpu_shapes import Shapes


def case_makers(shapes: Shapes, device: str) -> Iterator[tuple[str, CaseMaker]]:
    """Name and maker of every case; a maker allocates, so it is called when its turn comes."""
    yield from gpu_cases_linear.makers(shapes, device)
    yield from gpu_cases_attention.makers(shapes, device)
    yield from gpu_cases_rows.makers(shapes, device)
