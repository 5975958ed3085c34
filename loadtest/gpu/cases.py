"""Every kernel's case: the families' makers in one list."""

from __future__ import annotations

from collections.abc import Iterator

from epdserve.loadtest.gpu import cases_attention, cases_bytes, cases_linear, cases_rows
from epdserve.loadtest.gpu.case import CaseMaker
from epdserve.loadtest.gpu.shapes import Shapes


def case_makers(shapes: Shapes, device: str) -> Iterator[tuple[str, CaseMaker]]:
    """Name and maker of every case; a maker allocates, so it is called when its turn comes."""
    yield from cases_linear.makers(shapes, device)
    yield from cases_attention.makers(shapes, device)
    yield from cases_rows.makers(shapes, device)
    yield from cases_bytes.makers(shapes, device)
