"""Requests generated from our own description: whatever they are, the server answers what it describes, and never 5xx.

``python -m pytest tests/services/router/test_schemathesis.py`` with ``SCHEMATHESIS_EXAMPLES=500`` looks longer.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import hypothesis
import schemathesis
from epdserve.services.router.app import create_app
from epdserve.services.router.config import RouterConfig
from support.conformance import block, invoke, parameter, spoken
from support.fake_cluster import FakeCluster, Script
from support.real_tokenizer import real_tokenizer

EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "4"))

_cluster = FakeCluster(Script(spoken("r</think>ok\n\n", block(invoke("f", parameter("p", "a")))), batch=50))
_app = create_app(
    RouterConfig(model_dir=Path("unused"), model_name="demo"), _cluster, tokenizer=real_tokenizer()
)


async def _running(scope: Any, receive: Any, send: Any) -> None:
    """The application without its end: the library would start and end it with every request."""
    if scope["type"] == "lifespan":
        for stage in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{stage}.complete"})
        return
    await _app(scope, receive, send)


# One path of each operation; aliases have the same endpoints behind them
PATHS = (
    r"^/(v1/(chat/completions|completions|messages|messages/count_tokens|responses|models.*)|(de)?tokenize)$"
)
schema = schemathesis.openapi.from_asgi("/openapi.json", _running).include(path_regex=PATHS)


@schema.parametrize()
@hypothesis.settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
def test_no_request_breaks_the_server(case: Any) -> None:
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = "demo"  # or nothing but its name would be looked at
    response = case.call()
    assert response.status_code < 500 or response.status_code == 504, response.text
    assert _cluster.running_decodes == _cluster.running_prefills == 0


def test_the_server_is_well_afterwards() -> None:
    assert _cluster.open_leases == set()
    assert _app.state.parts.admission.load.requests == 0
