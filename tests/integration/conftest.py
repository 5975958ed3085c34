"""One server of real processes for all integration tests, and the check that each of them gives back what it took."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from epdserve.model.demo.writer import write_demo_model
from support.stack import Stack, running_stack


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests here share live processes and kill some of them: a file's tests run in the order they are written in."""
    here = Path(__file__).parent
    places = [place for place, item in enumerate(items) if here in item.path.parents]
    ours = sorted(
        (items[place] for place in places),
        key=lambda item: (
            "stack" not in getattr(item, "fixturenames", ()),
            str(item.path),
            item.location[1] or 0,
        ),
    )
    for place, item in zip(places, ours, strict=True):
        item.add_marker(pytest.mark.integration)
        items[place] = item


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """``epdserve up`` with the demo model, started once."""
    folder = tmp_path_factory.mktemp("stack")
    model_dir = write_demo_model(folder / "demo-model")
    with running_stack(folder / "state", "--port", "0", "--model", str(model_dir)) as running:
        yield running


@pytest.fixture(autouse=True)
def _conserved(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test that used the server: no page, slot or lease is held any more."""
    yield
    if "stack" in request.fixturenames:
        request.getfixturevalue("stack").assert_conserved()
