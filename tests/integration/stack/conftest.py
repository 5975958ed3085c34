"""One server of real processes for all tests here, and the check that each of them gives back what it took."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from epdserve.model.demo.writer import write_demo_model
from support.stack import Stack, running_stack


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server's processes write their spans."""
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, traces: Path) -> Iterator[Stack]:
    """``epdserve up`` with the demo model, started once; its requests are traced."""
    folder = tmp_path_factory.mktemp("stack")
    model_dir = write_demo_model(folder / "demo-model")
    environment = {"EPDSERVE_TRACES": f"file:{traces}"}
    arguments = ("--port", "0", "--model", str(model_dir))
    with running_stack(folder / "state", *arguments, environment=environment) as running:
        yield running


@pytest.fixture(autouse=True)
def _conserved(stack: Stack) -> Iterator[None]:
    """After every test: no page, slot or lease is held any more."""
    yield
    stack.assert_conserved()
