"""Integration tests share live processes."""

from pathlib import Path

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Some tests kill what others use: a file's tests run in the order they are written in."""
    here = Path(__file__).parent
    places = [place for place, item in enumerate(items) if here in item.path.parents]
    ours = sorted(
        (items[place] for place in places), key=lambda item: (str(item.path), item.location[1] or 0)
    )
    for place, item in zip(places, ours, strict=True):
        item.add_marker(pytest.mark.integration)
        items[place] = item
