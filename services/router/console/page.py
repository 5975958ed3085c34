"""``GET /console``: one page of three files of this folder, put together once. It loads nothing from anywhere.

What it shows comes as JSON from ``/admin/present``, and is put into the page as text, never as markup. Its policy
lets nothing run but the one script whose hash it names.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_MARKS: Final = {"style": "/* style */", "script": "/* script */"}


@cache
def console_page() -> tuple[str, str]:
    """The page, and the policy that goes with it."""
    folder = files(__package__)
    page, style, script = (
        folder.joinpath(name).read_text(encoding="ascii")
        for name in ("console.html", "console.css", "console.js")
    )
    whole = page.replace(_MARKS["style"], style).replace(_MARKS["script"], script)
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'; style-src 'sha256-{_hash(style)}'; script-src 'sha256-{_hash(script)}'"
    )
    return whole, policy


def console_routes(allowed: Callable[[Request], bool]) -> list[Route]:
    """The route of the page.

    Args:
        allowed: Whether a request may see it.
    """

    async def console(request: Request) -> Response:
        if not allowed(request):
            return Response("the console answers to loopback names only", 400, media_type="text/plain")
        page, policy = console_page()
        headers = {
            "content-security-policy": policy,
            "cache-control": "no-store",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
        }
        return Response(page, headers=headers, media_type="text/html")

    return [Route("/console", console, methods=["GET"])]


def _hash(text: str) -> str:
    return base64.b64encode(sha256(text.encode()).digest()).decode()
