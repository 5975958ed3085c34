"""Probes answer what a worker says of itself, and a place comes from the environment."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from epdserve.services.errors import Unavailable
from epdserve.services.pool.place import Place
from epdserve.services.pool.probe import ProbeServer


class Told:
    def __init__(self) -> None:
        self.live = self.ready = ""


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
async def url(told: Told) -> AsyncIterator[str]:
    server = ProbeServer(lambda: told.live, lambda: told.ready)
    await server.start("127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.port}"
    await server.stop()


async def test_probes_tell_apart_what_restarts_a_worker_and_what_keeps_work_away(
    told: Told, url: str
) -> None:
    told.ready = "draining"
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        assert (await http.get("/live")).status_code == 200
        answer = await http.get("/ready")
        assert (answer.status_code, answer.text) == (503, "draining\n")
        told.live, told.ready = "a step has run for 130 s", ""
        assert (await http.head("/ready?x")).status_code == 200
        assert (await http.get("/live")).status_code == 503
        assert (await http.get("/drain")).status_code == 404
        assert (await http.post("/ready")).status_code == 404


async def test_noise_on_the_port_of_probes_ends_the_connection_and_nothing_else(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    for noise in (b"\x00\xff\r\n\r\n", b"x" * 10_000 + b"\r\n\r\n", b"GET\r\n\r\n"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(noise)
        async with asyncio.timeout(5):
            assert b"200" not in await reader.read()
        writer.close()
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        assert (await http.get("/live")).status_code == 200


async def test_a_taken_port_is_refused(url: str) -> None:
    with pytest.raises(Unavailable, match="cannot answer probes"):
        await ProbeServer(str, str).start("127.0.0.1", int(url.rpartition(":")[2]))


def test_a_place_comes_from_the_environment() -> None:
    environ = {"EPDSERVE_HOST": "10.0.0.7", "EPDSERVE_PORT": "7400", "EPDSERVE_PROBE_PORT": "7402"}
    assert Place.from_environment({}) == Place()
    assert Place.from_environment({**environ, "EPDSERVE_PID_FILE": "/run/w.pid"}) == Place(
        host="10.0.0.7", port=7400, probe_port=7402, pid_file=Path("/run/w.pid")
    )
    with pytest.raises(ValueError, match="http"):
        Place.from_environment({"EPDSERVE_METRICS_PORT": "http"})
