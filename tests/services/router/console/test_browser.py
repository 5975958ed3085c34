"""The console in a real browser: it draws, it lets an administrator drain, and no text becomes markup.

    pytest tests/services/router/console/test_browser.py -m slow

Pictures are left in the folder that EPDSERVE_PICTURES names, for somebody to look at. Needs chromium.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from epdserve.services.errors import WorkerLost
from epdserve.services.router.app import RouterApp, create_app
from epdserve.services.router.config import RouterConfig
from epdserve.services.router.listening import bind
from epdserve.services.router.request import Trail, now
from epdserve.services.router.server import administered
from epdserve.services.router.tenancy.config import TenancySettings
from epdserve.services.types import Effort, WorkerRole, WorkerState
from prometheus_client import CollectorRegistry, Counter
from support.browser import Browser, browser
from support.fake_cluster import FakeCluster, worker_info
from support.real_tokenizer import real_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium")]

KEY = "an-administrators-key"
NASTY = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture
async def console(tmp_path: Path) -> AsyncIterator[tuple[str, FakeCluster, RouterApp]]:
    (tmp_path / "token").write_text("0123456789abcdef")
    (tmp_path / "key").write_text(KEY)
    with bind("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    settings = RouterConfig(
        model_dir=Path("unused"),
        model_name="deepseek-flash",
        tenancy=TenancySettings(admin_port=port, admin_key_file=tmp_path / "key", shared_limits=False),
        cluster_token_file=tmp_path / "token",
    )
    cluster = FakeCluster(infos=_workers())
    app = create_app(settings, cluster, tokenizer=real_tokenizer())
    with contextlib.ExitStack() as inside:
        _fill(app, inside)
        async with administered(app, settings):
            yield f"http://127.0.0.1:{port}/console", cluster, app


def _workers() -> list[Any]:
    roles = [("prefill", 2), ("decode", 3), ("encode", 1), ("store", 1)]
    infos = [
        worker_info(
            f"{role}-{number}",
            WorkerRole(role),
            running=number,
            free_pages=1000 - 170 * (number + 1),
            queued_tokens=512 * number,
            machine="node-a",
        )
        for role, count in roles
        for number in range(count)
    ]
    infos[2] = worker_info("decode-0", WorkerRole.DECODE, state=WorkerState.DRAINING, machine="node-a")
    return infos


def _fill(app: RouterApp, inside: contextlib.ExitStack) -> None:
    present = app.state.parts.present
    for number, stage in enumerate((0, 1, 2, 3, 4, 4, 4)):
        trail = Trail(received_at=now() - number)
        for reached, name in enumerate(("body_at", "placed_at", "prefilled_at", "first_token_at"), 1):
            if stage >= reached:
                setattr(trail, name, now())
        trail.prefill_worker, trail.decode_worker = "prefill-1", "decode-2"
        trail.drawn = list(range(20 * number))
        inside.enter_context(present.inside(f"request-{number:04d}", "/v1/chat/completions", "acme", trail))
    present.failed("request-9", "/v1/messages", WorkerLost(NASTY, worker="decode-1"), at=time.time())
    tokens = Counter("t", "t", ["source"], registry=CollectorRegistry())
    for step in range(120):
        for source, share in (
            ("device", 60 + step),
            ("host", 40),
            ("ssd", 20 + step // 4),
            ("computed", 150 - step),
        ):
            tokens.labels(source).inc(share)
        present.sample_tiers(tokens, at=time.time() - 600 + 5 * step)
    for level in (5, 20, 50, 50, 50, 75, 75, 75, 75, 75, 100, 100):
        present.effort(Effort(level), Effort(max(1, level - (30 if level > 90 else 0))))


async def test_the_console_draws_and_drains_on_a_desk_and_on_a_phone(
    console: tuple[str, FakeCluster, RouterApp], tmp_path: Path
) -> None:
    url, cluster, _ = console
    pictures = Path(os.environ.get("EPDSERVE_PICTURES", str(tmp_path)))

    def look() -> None:
        with browser(tmp_path / "profile") as page:
            page.screen(1280, 1000)
            page.go(url)
            page.wait("document.querySelectorAll('#workers tr').length == 7")
            page.picture(pictures / "console-desk.png")
            _check(page)
            page.screen(1280, 1000, dark=True)
            page.picture(pictures / "console-dark.png")
            page.screen(390, 844, phone=True)
            wide = "document.documentElement.scrollWidth"
            assert page.look(wide) <= 390, f"a phone has to scroll sideways: {page.look(wide)}"
            page.picture(pictures / "console-phone.png")
            page.screen(390, 844, phone=True, dark=True)
            page.picture(pictures / "console-phone-dark.png")
            _drain(page, lambda: cluster.drained)
            assert page.complaints() == [
                "Failed to load resource: the server responded with a status of 401 (Unauthorized)"
            ]

    await asyncio.to_thread(look)


def _check(page: Browser) -> None:
    assert page.look("document.title") == "epdserve console"
    assert NASTY in page.look("document.getElementById('errors').textContent")
    assert page.look("document.querySelectorAll('#errors img').length") == 0
    assert "6 of 7 workers ready" in page.look("document.getElementById('state').textContent")
    assert page.look("document.getElementById('stages').textContent") == (
        "read: 1place: 1prefill: 1hand-off: 1decode: 3"
    )
    assert page.look("document.querySelectorAll('#tiers rect').length") > 300
    assert page.look("document.querySelectorAll('#efforts rect').length") == 20
    paint = "getComputedStyle(document.querySelector('#tiers rect')).fill"
    assert page.look(paint) != "rgb(0, 0, 0)", "the policy let no style through"


def _drain(page: Browser, drained: Callable[[], dict[str, bool]]) -> None:
    button = "document.querySelector('[aria-label=\"%s\"]').click()"
    page.look(button % "Drain decode-1")
    page.wait("document.getElementById('said').textContent.includes('key')")
    assert drained() == {}
    page.look(f"document.getElementById('key').value = '{KEY}'")
    page.look(button % "Drain decode-1")
    page.wait("document.getElementById('said').textContent == 'decode-1 takes no new work'")
    page.look(button % "Undrain decode-0")
    page.wait("document.getElementById('said').textContent == 'decode-0 takes work again'")
    assert drained() == {"decode-1": True, "decode-0": False}
