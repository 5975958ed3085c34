"""Kernels run in Triton's interpreter here: it must be chosen before Triton is imported.

Ahead-of-time compilation needs the opposite and therefore runs in a process of its own (tests/kernels/aot).
"""

import os
import sys
import warnings
from collections.abc import Iterator

import numpy as np
import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    assert "triton" not in sys.modules, "Triton was imported before its interpreter could be chosen"
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def quiet_arithmetic() -> Iterator[None]:
    """The interpreter computes with numpy, which warns of infinities and NaN; a GPU does not."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
        yield
