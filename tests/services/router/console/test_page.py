"""The console as bytes: what it may load and run, and that what it shows comes as data."""

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from epdserve.services.errors import Draining, WorkerLost
from epdserve.services.router.app import create_app
from epdserve.services.router.config import RouterConfig
from epdserve.services.router.console.page import console_page
from epdserve.services.router.listening import bind
from epdserve.services.router.server import administered
from epdserve.services.router.tenancy.admin import HEADER, read_admin_key
from epdserve.services.router.tenancy.config import TenancySettings
from epdserve.services.types import WorkerRole, WorkerState
from support.fake_cluster import FakeCluster, Script, worker_info
from support.live_server import eventually
from support.real_tokenizer import real_tokenizer

KEY = "an-administrators-key"


class Desk:
    """A router with a scripted cluster, its API and its administration."""

    def __init__(self, settings: RouterConfig, admin: httpx.AsyncClient) -> None:
        self.settings, self.admin = settings, admin
        self.cluster = FakeCluster(Script(real_tokenizer().native.encode("so</think>yes"), first_gap_s=0.3))
        self.app = create_app(settings, self.cluster, tokenizer=real_tokenizer())
        transport = httpx.ASGITransport(app=self.app)
        self.api = httpx.AsyncClient(transport=transport, base_url="http://router")

    async def ask(self, **changes: object) -> httpx.Response:
        body = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        return await self.api.post("/v1/chat/completions", json={**body, **changes})


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    (tmp_path / "token").write_text("0123456789abcdef")
    (tmp_path / "key").write_text(KEY + "\n")
    with bind("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    tenancy = TenancySettings(admin_port=port, admin_key_file=tmp_path / "key", shared_limits=False)
    settings = RouterConfig(
        model_dir=Path("unused"),
        model_name="demo",
        tenancy=tenancy,
        cluster_token_file=tmp_path / "token",
        replacement_wait_s=0.0,
    )
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as admin:
        desk = Desk(settings, admin)
        async with administered(desk.app, settings):
            yield desk


async def test_the_page_runs_its_own_script_and_nothing_else(desk: Desk) -> None:
    answer = await desk.admin.get("/console")
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    for tag in ("script", "style"):
        [inside] = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"""\b(src|href|on\w+|style)=["']""", answer.text)
    assert (await desk.admin.get("/console", headers={"host": "evil.example"})).status_code == 400


def test_nothing_is_put_into_the_page_as_markup() -> None:
    page, _ = console_page()
    for door in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert door not in page
    wanted = set(re.findall(r'\bat\("([\w-]+)"\)', page)) | set(re.findall(r'\brows\("([\w-]+)"', page))
    assert wanted <= set(re.findall(r'\bid="([\w-]+)"', page))
    assert len(page) < 24_000


async def test_requests_inside_show_their_stage_and_failures_stay(desk: Desk) -> None:
    asking = asyncio.create_task(desk.ask(thinking={"type": "enabled"}, reasoning_effort=35))
    await eventually(lambda: bool(desk.cluster.decode_jobs))
    told = (await desk.admin.get("/admin/present")).json()
    assert [(one["stage"], one["path"], one["tokens"]) for one in told["inside"]] == [
        ("hand-off", "/v1/chat/completions", 0)
    ]
    assert (await asking).status_code == 200
    desk.cluster.script.prefill_errors = [WorkerLost("<b>gone</b>", worker="p0")] * 2
    assert (await desk.ask()).status_code == 503
    told = (await desk.admin.get("/admin/present")).json()
    assert told["inside"] == []
    [error] = told["errors"]
    assert (error["code"], error["path"]) == ("unavailable", "/v1/chat/completions")
    assert told["efforts"]["asked"] == told["efforts"]["granted"] == [0, 0, 0, 1, 0, 0, 0, 1, 0, 0]
    assert len(told["tiers"]) >= 1
    assert {worker["role"] for worker in told["workers"]} == {"prefill", "decode"}


async def test_changes_need_the_key_and_looking_does_not(desk: Desk) -> None:
    path, mine = "/admin/workers/p0/drain", {HEADER: "1", "authorization": f"Bearer {KEY}"}
    assert (await desk.admin.post(path, headers={HEADER: "1"})).status_code == 401
    wrong = {**mine, "authorization": "Bearer wrong"}
    assert (await desk.admin.post(path, headers=wrong)).status_code == 401
    assert (await desk.admin.post(path, headers={"authorization": f"Bearer {KEY}"})).status_code == 400
    assert desk.cluster.drained == {}
    assert (await desk.admin.post(path, headers=mine)).json() == {"worker": "p0", "draining": True}
    assert (await desk.admin.delete(path, headers=mine)).json() == {"worker": "p0", "draining": False}
    assert desk.cluster.drained == {"p0": False}
    assert (await desk.admin.post("/admin/workers/nobody/drain", headers=mine)).status_code == 404
    assert (await desk.admin.get("/admin/present")).status_code == 200


async def test_who_drains_hands_over_without_a_retry_being_spent(desk: Desk) -> None:
    """Two workers that drain one after the other would be too many, were they deaths."""
    desk.cluster.infos.append(worker_info("p1", WorkerRole.PREFILL))
    desk.cluster.infos.append(worker_info("p2", WorkerRole.PREFILL))
    desk.cluster.script.prefill_errors = [Draining("stopping"), Draining("stopping")]
    answer = await desk.ask(receipt=True)
    assert answer.status_code == 200, answer.text
    assert answer.json()["epdserve"]["handovers"] == 2
    assert len({worker for worker, _ in desk.cluster.prefill_jobs}) == 3
    assert all(info.state is WorkerState.READY for info in desk.cluster.infos)


def test_a_file_without_a_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("short\n")
    with pytest.raises(ValueError, match="16 or more"):
        read_admin_key(tmp_path / "key")
    assert read_admin_key(None) is None
