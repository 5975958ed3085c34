"""The gate in the running router: keys, limits, what is shared, what is logged, where it listens, administration."""

import asyncio
import hashlib
import json
import logging
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from epdserve.services.router.app import create_app
from epdserve.services.router.config import RouterConfig
from epdserve.services.router.server import administered, bind, uvicorn_server
from epdserve.services.router.tenancy.admin import HEADER
from epdserve.services.router.tenancy.assembly import listening_host
from epdserve.services.router.tenancy.config import TenancySettings
from support.fake_cluster import FakeCluster, Script
from support.live_server import eventually
from support.real_tokenizer import real_tokenizer
from support.valkey import url_of, valkey_server

PATH = "/v1/chat/completions"
SECRET, PROMPT = "sk-topsecret-0123456789", "a prompt that nobody else may read"


def hashed(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def config(tmp_path: Path, *tenants: str, **tenancy: Any) -> RouterConfig:
    (tmp_path / "tenants.toml").write_text("\n".join(tenants))
    settings = {"tenants_file": tmp_path / "tenants.toml", "shared_limits": False, **tenancy}
    return RouterConfig(
        model_dir=Path("unused"),
        model_name="demo",
        isolation="key",
        tenancy=TenancySettings.model_validate(settings),
    )


def table(name: str, key: str, **limits: Any) -> str:
    lines = [f"{field} = {json.dumps(value)}" for field, value in limits.items()]
    return "\n".join([f"[tenants.{name}]", f'keys = ["{hashed(key)}"]', *lines])


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, **changes}


def ids(text: str) -> list[int]:
    return real_tokenizer().native.encode(text)


class Served:
    """A router in this process, its cluster, and clients of tenants."""

    def __init__(self, settings: RouterConfig) -> None:
        self.cluster = FakeCluster(Script(ids("so</think>yes")))
        self.app = create_app(settings, self.cluster, tokenizer=real_tokenizer())
        transport = httpx.ASGITransport(app=self.app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://router")

    async def post(self, key: str, **changes: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return await self.client.post(PATH, json=body(**changes), headers=headers)

    @property
    def tenant_keys(self) -> list[bytes]:
        return [job.tenant_key for _, job in self.cluster.prefill_jobs]


async def test_keys_open_the_door_and_nothing_else_does(tmp_path: Path) -> None:
    served = Served(config(tmp_path, table("alice", SECRET)))
    assert (await served.post(SECRET)).status_code == 200
    for key in ("", "wrong", hashed(SECRET), hashed(SECRET).removeprefix("sha256:")):
        answer = await served.post(key)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert SECRET not in answer.text


async def test_over_a_limit_the_answer_says_when_to_come_back(tmp_path: Path) -> None:
    served = Served(
        config(tmp_path, table("alice", "a", requests_per_minute=2), table("bob", "b", tokens_per_minute=10))
    )
    assert [(await served.post("a")).status_code for _ in range(3)] == [200, 200, 429]
    answer = await served.post("a")
    assert 1 <= int(answer.headers["retry-after"]) <= 30
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert (await served.post("b")).status_code == 200
    answer = await served.post("b")
    assert answer.status_code == 429
    assert "10 tokens a minute" in answer.json()["error"]["message"]
    used = answer.headers["retry-after"]
    assert int(used) > 60  # the first request took more than a minute's worth
    assert served.app.state.parts.gate.inside == {}


async def test_a_refused_body_costs_no_place(tmp_path: Path) -> None:
    served = Served(config(tmp_path, table("alice", "a", concurrent=1), max_tools=1))
    for _ in range(3):
        assert (await served.post("a", tools=[{}, {}])).status_code == 400
        assert (await served.post("a", model="other")).status_code == 404
    assert (await served.post("a")).status_code == 200


async def test_only_tenants_of_a_group_share_cached_blocks(tmp_path: Path) -> None:
    served = Served(
        config(
            tmp_path,
            table("alice", "a", group="acme"),
            table("anna", "n", group="acme"),
            table("bob", "b"),
        )
    )
    for key in ("a", "n", "b"):
        assert (await served.post(key)).status_code == 200
    alice, anna, bob = served.tenant_keys
    assert alice == anna != bob
    gate = served.app.state.parts.gate
    await gate.epochs.raise_of(gate.directory.tenants["alice"])
    for key in ("n", "b"):
        await served.post(key)
    assert served.tenant_keys[3] not in (alice, bob)
    assert served.tenant_keys[4] == bob


async def test_keys_and_prompts_are_in_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    served = Served(config(tmp_path, table("alice", SECRET, requests_per_minute=2)))
    for key, changes in (
        (SECRET, {}),
        (SECRET, {"stream": True}),
        (SECRET, {}),
        (SECRET + "x", {}),
        (SECRET, {"temperature": PROMPT}),
        (SECRET, {"model": PROMPT}),
    ):
        await served.post(key, **changes)
    (tmp_path / "tenants.toml").write_text(f'[tenants.alice]\nkeys = ["{SECRET}"]')
    await served.app.state.parts.gate.directory.refresh()
    written = "\n".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)
    assert "tenants not read again" in written
    assert SECRET not in written
    assert hashed(SECRET).removeprefix("sha256:") not in written
    assert PROMPT not in written


@pytest.mark.parametrize(
    ("host", "keyless", "open_", "wanted"),
    [
        ("0.0.0.0", True, False, "127.0.0.1"),
        ("::", True, False, "127.0.0.1"),
        ("10.0.0.5", True, False, "127.0.0.1"),
        ("router.example", True, False, "127.0.0.1"),
        ("127.0.0.2", True, False, "127.0.0.2"),
        ("::1", True, False, "::1"),
        ("localhost", True, False, "localhost"),
        ("0.0.0.0", False, False, "0.0.0.0"),
        ("0.0.0.0", True, True, "0.0.0.0"),
    ],
)
def test_without_keys_it_listens_on_loopback_and_says_so(
    host: str, keyless: bool, open_: bool, wanted: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = TenancySettings(open_without_keys=open_)
    assert listening_host(host, settings, keyless=keyless) == wanted
    assert ("no API keys" in caplog.text) == (host != wanted)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Served]]:
    (tmp_path / "token").write_text("t" * 32)
    (tmp_path / "token").chmod(0o600)
    with bind("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    settings = config(tmp_path, table("alice", "a"), admin_port=port).model_copy(
        update={"cluster_token_file": tmp_path / "token"}
    )
    served = Served(settings)
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}")
    async with administered(served.app, settings), client:
        yield client, served


async def test_an_administrator_looks_drains_and_forgets(desk: tuple[httpx.AsyncClient, Served]) -> None:
    client, served = desk
    mine = {HEADER: "1"}
    load = (await client.get("/admin/load")).json()
    assert {"draining", "inside", "refused", "admission", "bodies_bytes", "workers"} <= load.keys()
    assert len(load["workers"]) == len(served.cluster.workers())
    [alice] = (await client.get("/admin/tenants")).json()
    assert (alice["name"], alice["keys"], alice["inside"]) == ("alice", 1, 0)
    assert (await client.get("/admin/tenants/nobody")).status_code == 404
    assert (await client.post("/admin/drain", headers=mine)).json() == {"draining": True}
    answer = await served.post("a")
    assert answer.status_code == 503
    assert (await served.client.get("/ready")).json()["status"] == "draining"
    assert (await client.delete("/admin/drain", headers=mine)).json() == {"draining": False}
    answer = await served.post("a")
    assert answer.status_code == 200
    for name in (answer.headers["x-request-id"], answer.json()["id"]):
        why = (await client.get(f"/admin/explain/{name}")).json()
        assert [(one["prefill"], one["decode"]) for one in why["pairs"]] == [("p0", "d0")]
        assert {"cost", "ttft_s", "tpot_s", "hit_tokens"} <= why["pairs"][0].keys()
    assert (await client.get("/admin/explain/nobody")).status_code == 404
    for path, method in (("/admin/tenants/alice/data", "DELETE"), ("/admin/caches/reset", "POST")):
        answer = await client.request(method, path, headers=mine)
        assert answer.status_code == 200, answer.text
        await served.post("a")
    assert len(set(served.tenant_keys)) == 3
    assert (await client.post("/admin/keys/reload", headers=mine)).json() == {"tenants": 1}


async def test_web_pages_cannot_administer(desk: tuple[httpx.AsyncClient, Served]) -> None:
    client, served = desk
    assert (await client.post("/admin/drain")).status_code == 400
    assert (await client.get("/admin/load", headers={"host": "evil.example"})).status_code == 400
    assert not served.app.state.parts.gate.draining


def certificate(key: Path, cert: Path) -> None:
    """A certificate for 127.0.0.1, signed by itself."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    extra = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *extra], check=True, capture_output=True, timeout=30)


@pytest.mark.needs("openssl")
async def test_the_router_speaks_tls(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    await asyncio.to_thread(certificate, key, cert)
    settings = config(tmp_path, table("alice", "a"), tls_cert_file=cert, tls_key_file=key)
    served, sock = Served(settings), bind("127.0.0.1", 0)
    server = uvicorn_server(served.app, settings)
    task = asyncio.create_task(server._serve([sock]))
    await eventually(lambda: server.started, within_s=10)
    url = f"https://127.0.0.1:{sock.getsockname()[1]}"
    async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=str(cert))) as client:
        answer = await client.post(url + PATH, json=body(), headers={"x-api-key": "a"})
    assert answer.status_code == 200
    server.should_exit = True
    await asyncio.wait_for(task, 10)


def test_tls_needs_both_files() -> None:
    for half in ({"tls_cert_file": "a"}, {"tls_key_file": "a"}, {"tls_client_ca_file": "a"}):
        with pytest.raises(ValueError, match="tls"):
            TenancySettings.model_validate(half)


async def test_two_routers_count_together(tmp_path: Path) -> None:
    with valkey_server() as server:
        settings = config(
            tmp_path, table("alice", "a", requests_per_minute=3), shared_limits=True
        ).model_copy(update={"registry_url": url_of(server)})
        first, second = Served(settings), Served(settings)
        codes = [(await served.post("a")).status_code for served in (first, second, first, second)]
        assert codes == [200, 200, 200, 429]
        for served in (first, second):
            await served.app.state.parts.gate.close()
