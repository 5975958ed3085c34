"""The router's pipeline over scripted workers."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from epdserve.services.router.ledger import InFlightLedger
from epdserve.services.router.pipeline import Pipeline, PipelineLimits
from epdserve.services.router.request import GenerateRequest, Trail
from epdserve.services.router.routing import Placer
from epdserve.services.types import FinishReason, SamplingParams, WorkerInfo, WorkerRole, token_ids
from support.fake_cluster import FakeCluster, worker_info

PROMPT = token_ids(range(100, 150))
KEY = b"k" * 32
OUTPUT = list(range(200, 220))


def pool(prefills: int = 1, decodes: int = 1) -> list[WorkerInfo]:
    return [
        *(worker_info(f"p{i}", WorkerRole.PREFILL) for i in range(prefills)),
        *(worker_info(f"d{i}", WorkerRole.DECODE) for i in range(decodes)),
    ]


def pipeline_of(cluster: FakeCluster, **limits: Any) -> tuple[Pipeline, InFlightLedger]:
    ledger = InFlightLedger()
    limits = {"decode_stall_s": 2.0, "replacement_wait_s": 0.0, **limits}
    return Pipeline(cluster, Placer(cluster, ledger), ledger, PipelineLimits(**limits)), ledger


def request(**changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {
        "request_id": "r1",
        "tokens": PROMPT,
        "tenant_key": KEY,
        "sampling": SamplingParams(seed=1, max_tokens=100),
        "deadline_at": asyncio.get_running_loop().time() + 5,
        **changes,
    }
    return GenerateRequest(**fields)


async def run(
    pipeline: Pipeline, request: GenerateRequest, trail: Trail | None = None
) -> tuple[list[int], FinishReason]:
    """All tokens; checks offsets on the way."""
    tokens: list[int] = []
    async with aclosing(pipeline.generate(request, trail or Trail(0.0))) as chunks:
        async for chunk in chunks:
            assert chunk.offset == len(tokens)
            assert chunk.error is None
            tokens.extend(chunk.tokens)
            if chunk.finish_reason is not None:
                return tokens, chunk.finish_reason
    raise AssertionError("no finish reason")
