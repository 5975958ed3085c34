"""How a test's own helpers are found by processes that it starts."""

import os
from pathlib import Path


def environment(**more: str) -> dict[str, str]:
    """This process's environment, in which ``support`` can be imported, and the same ``epdserve`` as here."""
    tests = str(Path(__file__).parent.parent)
    paths = [tests, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **more}
