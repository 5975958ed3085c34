"""One server of real processes for all tests here, and the check that each of them gives back what it took."""

from collections.abc import Iterator

import pytest
from epdserve.model.demo.writer import write_demo_model
from support.stack import Stack, running_stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """``epdserve up`` with the demo model, started once."""
    folder = tmp_path_factory.mktemp("stack")
    model_dir = write_demo_model(folder / "demo-model")
    with running_stack(folder / "state", "--port", "0", "--model", str(model_dir)) as running:
        yield running


@pytest.fixture(autouse=True)
def _conserved(stack: Stack) -> Iterator[None]:
    """After every test: no page, slot or lease is held any more."""
    yield
    stack.assert_conserved()
