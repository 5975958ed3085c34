"""A router in front of live encode, prefill and decode pools, chats with pictures, and what one process answers."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from epdserve.model.backbone import Backbone
from epdserve.model.batch import ImageSpan
from epdserve.model.config import ModelConfig
from epdserve.model.demo.writer import write_demo_model
from epdserve.model.logits import LogitsPlan, LogitsRun
from epdserve.model.precision import Precision
from epdserve.model.tokenizer import Tokenizer
from epdserve.model.vision.encoder import PatchedImage, VisionEncoder
from epdserve.model.vision.pixels import ImageLimits, read_pixels
from epdserve.services.pool.view import ClusterView
from epdserve.services.router.app import create_app
from epdserve.services.router.config import RouterConfig
from epdserve.services.router.rpc_cluster import RpcCluster
from epdserve.services.router.server import bind, uvicorn_server
from support.live_server import eventually
from support.pools import DECODE, PREFILL, TOKEN, Pools, pools

ENCODE = "epdserve.services.encode.service"
BLOCK = 32


@dataclass
class Served:
    """A router in front of live pools."""

    live: Pools
    http: httpx.AsyncClient
    model_dir: Path

    async def chat(self, messages: list[dict[str, Any]], **fields: Any) -> httpx.Response:
        body = {"model": "deepseek-flash", "messages": messages, "temperature": 0, "max_tokens": 5}
        return await self.http.post(
            "/v1/chat/completions", json={**body, "thinking": {"type": "disabled"}, **fields}
        )


def image(data: bytes, **more: Any) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@asynccontextmanager
async def served_images(folder: Path, images: dict[str, Any] | None = None) -> AsyncIterator[Served]:
    """One worker of each pool in this process, named encode-0, prefill-0 and decode-0; more may be started.

    Args:
        images: Settings of the router for images.
    """
    model_dir = write_demo_model(folder / "demo")
    engine = {"model_dir": str(model_dir), "block_tokens": BLOCK, "num_pages": 256}
    async with pools(folder) as live:
        await live.start("encode-0", ENCODE, model_dir=str(model_dir), cache_bytes=2**22)
        await live.start("prefill-0", PREFILL, engine=engine, images={"mode": "pool"})
        await live.start("decode-0", DECODE, engine=engine)
        config = RouterConfig.model_validate(
            {"model_dir": model_dir, "max_body_bytes": 2**22, "images": images or {}}
        )
        view = ClusterView(live.registry, lease_s=5.0, refresh_s=0.1)
        app = create_app(config, RpcCluster(view, token=TOKEN, router_id="router-0"))
        with bind("127.0.0.1", 0) as sock:
            server = uvicorn_server(app, config)
            serving = asyncio.create_task(server._serve([sock]))
            await eventually(lambda: server.started, within_s=20)
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
                yield Served(live, http, model_dir)
            server.should_exit = True
            await asyncio.wait_for(serving, 20)


@cache
def whole(model_dir: Path) -> tuple[Backbone, VisionEncoder, Tokenizer]:
    """One process with all of the model."""
    encoder = VisionEncoder.load(model_dir, ModelConfig.from_directory(model_dir))
    tokenizer = Tokenizer((model_dir / "tokenizer.json").read_text())
    return Backbone.load(model_dir, precision=Precision.F32Q), encoder, tokenizer


async def answered(served: Served, *args: Any, **options: Any) -> str:
    """Greedy text of one process; in a thread, as heartbeats are to go on."""
    return await asyncio.to_thread(_answered, served.model_dir, *args, **options)


def _answered(model_dir: Path, ids: list[int], files: list[bytes], *, count: int, hit: int = 0) -> str:
    backbone, encoder, tokenizer = whole(model_dir)
    spans, at = [], 0
    places = np.flatnonzero(np.array(ids) == backbone.config.image_token_id)
    for data in files:
        shape, pixels = read_pixels(data, encoder.config, ImageLimits())
        embeddings = encoder.encode([PatchedImage(shape, pixels)])[0].to(torch.bfloat16)
        spans.append(ImageSpan(int(places[at]), embeddings))
        at += len(embeddings)
    assert at == len(places)
    tokens = list(ids)
    for _ in range(count):
        plan = LogitsPlan(prefill=len(ids), decoder_replay=True, encoder_hit=hit, images=spans)
        logits = LogitsRun(backbone, np.array(tokens), plan, block_tokens=BLOCK).run()[-1]
        tokens.append(int(logits.argmax()))
    return tokenizer.decode(tokens[len(ids) :])


async def tokens_of(served: Served, messages: list[dict[str, Any]]) -> list[int]:
    body = {"messages": messages, "thinking": {"type": "disabled"}}
    answer = await served.http.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["tokens"]
    return ids
