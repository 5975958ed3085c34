from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from epdserve.services.errors import Unavailable
from epdserve.services.observability.metrics import MetricsServer, new_registry
from prometheus_client import Counter


def fetch(address: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}/metrics", timeout=5) as answer:
        body: bytes = answer.read()
    return body.decode()


async def test_metrics_are_served_on_a_free_loopback_port_until_closed() -> None:
    registry = new_registry()
    Counter("epdserve_test_things", "Things", registry=registry).inc(3)
    server = MetricsServer(registry)
    assert server.address.startswith("127.0.0.1:")
    text = fetch(server.address)
    assert "epdserve_test_things_total 3.0" in text
    assert "process_cpu_seconds_total" in text
    await server.aclose()
    with pytest.raises(urllib.error.URLError):
        fetch(server.address)


def test_two_registries_do_not_meet() -> None:
    first, second = new_registry(process=False), new_registry(process=False)
    Counter("epdserve_test_things", "Things", registry=first)
    Counter("epdserve_test_things", "Things", registry=second)
    with MetricsServer(first) as a, MetricsServer(second) as b:
        assert a.address != b.address
        assert "process_cpu" not in fetch(a.address)


@pytest.mark.parametrize("port", ["taken", "99999", "x"])
def test_address_that_cannot_be_bound_is_a_clear_error(port: str) -> None:
    with MetricsServer(new_registry(process=False)) as other:
        address = other.address if port == "taken" else f"127.0.0.1:{port}"
        with pytest.raises(Unavailable, match=address):
            MetricsServer(new_registry(process=False), address=address)
