"""Image chats over HTTP through three real pools, against one process that holds the whole demo model."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
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
from support.vision import encoded, picture

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.integration]

ENCODE = "epdserve.services.encode.service"
BLOCK = 32
CAT, DOG, STRIP = (
    encoded(picture(40, 30, seed=1)),
    encoded(picture(40, 30, seed=2), "JPEG"),
    encoded(picture(300, 20, seed=3), "WEBP"),
)


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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    model_dir = write_demo_model(tmp_path_factory.mktemp("model") / "demo")
    engine = {"model_dir": str(model_dir), "block_tokens": BLOCK, "num_pages": 256}
    async with pools(tmp_path_factory.mktemp("pools")) as live:
        await live.start("encode-0", ENCODE, model_dir=str(model_dir), cache_bytes=2**22)
        await live.start("prefill-0", PREFILL, engine=engine, images={"mode": "pool"})
        await live.start("decode-0", DECODE, engine=engine)
        config = RouterConfig(model_dir=model_dir, max_body_bytes=2**22)
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


async def streamed(served: Served, messages: list[dict[str, Any]]) -> str:
    answer = await served.chat(messages, stream=True)
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


async def test_an_image_chat_equals_one_process_streamed_or_not_cold_or_cached(served: Served) -> None:
    messages = [user(text("What is in this picture?"), image(CAT, detail="low"))]
    ids = await tokens_of(served, messages)
    first = (await served.chat(messages)).json()
    assert first["usage"]["prompt_tokens"] == len(ids) > 184
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    expected = await answered(served, ids, [CAT], count=5)
    assert first["choices"][0]["message"]["content"] == expected
    again = (await served.chat(messages)).json()
    assert "usage" in again, again
    hit = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert hit >= 184
    warm = await answered(served, ids, [CAT], count=5, hit=hit)
    assert again["choices"][0]["message"]["content"] == warm
    assert await streamed(served, messages) == warm
    await served.live.assert_conserved("prefill-0", "decode-0", "encode-0")


async def test_images_stand_in_system_user_and_tool_messages_several_in_one(served: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": [text("Be brief."), image(STRIP)]},
        user(image(CAT), text("and"), image(DOG)),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [text("seen:"), image(CAT)]},
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    answer = await served.chat(messages, tools=tools, max_tokens=2)
    assert answer.status_code == 200, answer.text
    image_token = whole(served.model_dir)[0].config.image_token_id
    spans = [
        (await tokens_of(served, [user(image(data))])).count(image_token) for data in (STRIP, CAT, DOG, CAT)
    ]
    assert min(spans) >= 184
    assert sum(spans) < answer.json()["usage"]["prompt_tokens"] < sum(spans) + 400
    await served.live.assert_conserved("prefill-0", "decode-0", "encode-0")


async def test_two_pictures_of_one_size_are_told_apart(served: Served) -> None:
    """Their prompts have the same ids, and must share nothing from the first image on."""
    one, other = [user(image(CAT), text("Describe it."))], [user(image(DOG), text("Describe it."))]
    ids = await tokens_of(served, one)
    assert ids == await tokens_of(served, other)
    await served.chat(one)
    answer = (await served.chat(other)).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert answer["choices"][0]["message"]["content"] == await answered(served, ids, [DOG], count=5)


@pytest.mark.parametrize(
    ("part", "status"),
    [
        (image(b""), 400),
        (image(b"GIF89a"), 400),
        (image(b"hello, this is no image"), 400),
        (image(CAT[: len(CAT) // 2]), 400),
        (image(encoded(picture(8, 8), "BMP")), 400),
        (image(encoded(picture(1, 1))), 200),
        (image(encoded(picture(16_385, 1))), 413),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}, 400),
        ({"type": "image_url", "image_url": {"url": "https://127.0.0.1/a.png"}}, 400),
        ({"type": "image_url", "image_url": {"url": "http://" + "user:x@localhost/a.png"}}, 400),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, 400),
    ],
    ids=[
        "empty", "header", "text", "truncated", "bmp", "one pixel", "long", "base64", "private", "credentials",
        "file",
    ],
)  # fmt: skip
async def test_bad_images_are_refused_in_the_apis_shape(
    served: Served, part: dict[str, Any], status: int
) -> None:
    answer = await served.chat([user(text("See:"), part)], max_tokens=1)
    assert answer.status_code == status, answer.text
    if status != 200:
        assert answer.json()["error"]["message"]
    await served.live.assert_conserved("prefill-0", "decode-0", "encode-0")


async def test_too_many_images_are_refused(served: Served) -> None:
    answer = await served.chat([user(*[image(CAT)] * 200)])
    assert answer.status_code in (400, 413)
    assert "images" in answer.json()["error"]["message"]


async def test_text_goes_on_as_ever(served: Served) -> None:
    answer = (await served.chat([user(text("Hello there"))])).json()
    assert answer["usage"]["completion_tokens"] > 0


async def test_without_an_encode_worker_the_modality_is_named(served: Served) -> None:
    """The last one: it takes the pool away."""
    await served.live.stop("encode-0")
    await asyncio.sleep(0.5)
    answer = await served.chat([user(image(CAT))])
    assert answer.status_code == 400
    assert "image" in answer.json()["error"]["message"]
    assert (await served.chat([user(text("Hello"))])).status_code == 200
