from __future__ import annotations

import grpc
import pytest
from epdserve.services import errors
from epdserve.services.errors import STATUS, ServiceError


def leaves() -> list[type[ServiceError]]:
    """Those of this module: the router has some of its own for HTTP, with a table of its own."""
    found = [ServiceError]
    for kind in found:
        found.extend(kind.__subclasses__())
    return [kind for kind in found[1:] if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", leaves())
def test_every_error_stands_in_the_table_under_its_code(kind: type[ServiceError]) -> None:
    assert STATUS[kind.code].error is kind


@pytest.mark.parametrize("kind", leaves())
def test_every_error_stands_in_the_tree_of_the_docstring(kind: type[ServiceError]) -> None:
    assert errors.__doc__ is not None
    assert kind.__name__ in errors.__doc__


@pytest.mark.parametrize("code", STATUS)
def test_grpc_knows_every_status_of_the_table(code: str) -> None:
    assert STATUS[code].grpc_status in grpc.StatusCode.__members__
    assert 400 <= STATUS[code].http_status < 600


def test_error_tells_its_statuses() -> None:
    error = errors.Overloaded("busy", retry_after_s=2.0)
    assert (error.http_status, error.grpc_status, error.retry_after_s) == (429, "RESOURCE_EXHAUSTED", 2.0)
    assert str(error) == "busy"
