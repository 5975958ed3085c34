"""The number of series does not grow with clients: not with tenants, not with what a scanner asks for."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import httpx
from epdserve.services.router.config import RouterConfig
from epdserve.services.router.tenancy.config import TenancySettings
from support.fake_cluster import FakeCluster
from support.live_server import LiveRouter, live_router

TENANTS = 1000
SCANNED = (
    "/.env",
    "/wp-login.php",
    "/v1/models/x{}",
    "/admin/{}",
    "/v1/chat/completions/{}",
    "/%2e%2e/{}",
    "/a{}?b={}",
)


def tenants_file(folder: Path) -> Path:
    lines = []
    for number in range(TENANTS):
        digest = hashlib.sha256(f"key-of-tenant-{number:06}".encode()).hexdigest()
        lines += [f"[tenants.t{number}]", f'keys = ["sha256:{digest}"]']
    file = folder / "tenants.toml"
    file.write_text("\n".join(lines))
    return file


async def series(client: httpx.AsyncClient) -> int:
    text = (await client.get("/metrics")).text
    return sum(not line.startswith("#") for line in text.splitlines())


async def chat(client: httpx.AsyncClient, number: int) -> int:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": f"{number}"}],
        "max_tokens": 4,
        "user": f"u{number}",
        "safety_identifier": f"s{number}",
    }
    headers = {"authorization": f"Bearer key-of-tenant-{number:06}", "x-request-id": f"r-{number}"}
    return (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code


async def scan(client: httpx.AsyncClient, number: int) -> int:
    path = SCANNED[number % len(SCANNED)].replace("{}", str(number))
    method = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")[number % 6]
    return (await client.request(method, path, headers={"user-agent": f"scanner/{number}"})).status_code


async def test_a_thousand_tenants_and_a_scanner_add_no_series(tmp_path: Path) -> None:
    tenancy = TenancySettings(tenants_file=tenants_file(tmp_path), shared_limits=False)
    config = RouterConfig(model_dir=Path("unused"), model_name="demo", isolation="key", tenancy=tenancy)
    async with live_router(config, FakeCluster()) as router:
        await everybody_comes(router)


async def everybody_comes(router: LiveRouter) -> None:
    async with httpx.AsyncClient(base_url=router.url, timeout=60, trust_env=False) as client:
        before, answers = 0, set[int]()
        for first in range(0, TENANTS, 50):
            some = range(first, first + 50)
            answers |= set(await asyncio.gather(*(chat(client, number) for number in some)))
            answers |= set(await asyncio.gather(*(scan(client, number) for number in some[::4])))
            before = before or await series(client)
        assert 200 in answers
        assert answers & {401, 404, 405}
        assert not {status for status in answers if status >= 500}
        # a label's value that is of a closed set may come late
        assert await series(client) <= before + 10
        assert before < 600
