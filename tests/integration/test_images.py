"""Image chats over HTTP through three real pools, against one process that holds the whole demo model."""

import asyncio
import base64
import json
import struct
import zlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from epdserve.services.router.images import opening
from epdserve.services.router.images.fetcher import ImageFetcher
from support.image_chat import Served, answered, image, served_images, text, tokens_of, user, whole
from support.vision import encoded, picture
from support.web import says, world

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.integration]

CAT, DOG, STRIP = (
    encoded(picture(40, 30, seed=1)),
    encoded(picture(40, 30, seed=2), "JPEG"),
    encoded(picture(300, 20, seed=3), "WEBP"),
)
# One row of zeros, said to be a picture of 60,000 pixels a side
BOMB = b"\x89PNG\r\n\x1a\n" + b"".join(
    struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    for kind, data in (
        (b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(180_001))),
        (b"IEND", b""),
    )
)


async def outside_says(head: str, writer: asyncio.StreamWriter) -> None:
    """What the world answers to the router's fetcher."""
    match head.split()[1]:
        case "/cat.png":
            await says("200 OK", CAT)(head, writer)
        case "/text":
            await says("200 OK", b"hello, this is no image")(head, writer)
        case "/loop":
            await says("302 Found", Location="/loop")(head, writer)
        case "/inside":
            port = writer.get_extra_info("sockname")[1]
            await says("302 Found", Location=f"http://inside.example:{port}/cat.png")(head, writer)
        case "/slow":
            await asyncio.sleep(30)
        case _:
            await says("404 Not Found")(head, writer)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def outside() -> AsyncIterator[int]:
    async with world(outside_says) as port:
        yield port


async def resolve(host: str, port: int) -> list[str]:
    return ["127.0.0.1"] if host == "pics.example" else ["10.0.0.1"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, outside: int) -> AsyncIterator[Served]:
    hosts = [f"{name}.example:{outside}" for name in ("pics", "inside")]
    images = {"allowed_hosts": hosts, "allow_http": True, "max_redirects": 1, "fetch_timeout_s": 2.0}
    with pytest.MonkeyPatch.context() as patch:
        fetcher = partial(ImageFetcher, resolve=resolve, reachable=lambda address: address == "127.0.0.1")
        patch.setattr(opening, "ImageFetcher", fetcher)
        async with served_images(tmp_path_factory.mktemp("images"), images) as served:
            yield served


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
    new = encoded(picture(40, 30, seed=6))
    messages, patches = [user(text("And here?"), image(new))], "epdserve_encode_patches_total"
    before = await served.live.metric("encode-0", patches)
    cold = await streamed(served, messages)
    assert await served.live.metric("encode-0", patches) > before
    assert cold == await answered(served, await tokens_of(served, messages), [new], count=5)
    await served.live.assert_conserved("prefill-0", "decode-0", "encode-0")


async def test_the_same_picture_in_the_next_turn_costs_nothing(served: Served) -> None:
    """It is embedded once, and its blocks are hit; beyond the window not even its embeddings move again."""
    turn = [user(image(encoded(picture(60, 60, seed=4))), text("What is this? " * 80))]
    first = (await served.chat(turn)).json()
    patches = await served.live.metric("encode-0", "epdserve_encode_patches_total")
    pulled = await served.live.metric("prefill-0", "epdserve_image_fetch_bytes_total")
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    second = (await served.chat([*turn, said, user(text("And what else?"))])).json()
    assert (
        second["usage"]["prompt_tokens_details"]["cached_tokens"]
        >= first["usage"]["prompt_tokens"] // 32 * 32
    )
    assert await served.live.metric("encode-0", "epdserve_encode_patches_total") == patches > 0
    assert await served.live.metric("prefill-0", "epdserve_image_fetch_bytes_total") == pulled > 0


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
        (image(encoded(picture(20_000, 1))), 413),
        (image(BOMB), 413),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}, 400),
        ({"type": "image_url", "image_url": {"url": "https://127.0.0.1/a.png"}}, 400),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, 400),
    ],
    ids=[
        "empty", "header", "text", "truncated", "bmp", "one pixel", "long", "bomb", "base64", "private", "file",
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


def linked(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


async def test_a_picture_by_its_url_is_the_picture_in_the_body(served: Served, outside: int) -> None:
    """The router fetched it: whoever embeds it was given bytes, and finds it under the same name."""
    patches = "epdserve_encode_patches_total"
    by_url = (
        await served.chat([user(text("Fetched:"), linked(f"http://pics.example:{outside}/cat.png"))])
    ).json()
    before = await served.live.metric("encode-0", patches)
    in_body = (await served.chat([user(text("Fetched:"), image(CAT))])).json()
    assert in_body["usage"]["prompt_tokens"] == by_url["usage"]["prompt_tokens"] > 184
    assert in_body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert await served.live.metric("encode-0", patches) == before > 0


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://inside.example:PORT/cat.png", "address"),
        ("http://pics.example:PORT/inside", "address"),
        ("http://pics.example:PORT/loop", "redirects"),
        ("http://pics.example:PORT/slow", "within"),
        ("http://pics.example:PORT/text", "no PNG"),
        ("http://pics.example:PORT/none", "404"),
        ("http://" + "user:x@pics.example:PORT/cat.png", "credentials"),
        ("http://other.example:PORT/cat.png", "host"),
    ],
)
async def test_bad_urls_are_refused_in_the_apis_shape(
    served: Served, outside: int, url: str, why: str
) -> None:
    answer = await served.chat([user(text("See:"), linked(url.replace("PORT", str(outside))))], max_tokens=1)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert why in error["message"]
    assert error["param"] == "messages"


async def test_anthropic_images_are_the_same_images(served: Served) -> None:
    said = (await served.chat([user(image(DOG), text("Whose is it?"))])).json()
    source = {"type": "base64", "media_type": "image/jpeg", "data": base64.b64encode(DOG).decode()}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "Whose is it?"}]
    body = {
        "model": "deepseek-flash",
        "messages": [{"role": "user", "content": content}],
        "thinking": {"type": "disabled"},
    }
    counted = await served.http.post("/v1/messages/count_tokens", json=body)
    assert counted.json() == {"input_tokens": said["usage"]["prompt_tokens"]}
    asked = {**body, "max_tokens": 5, "temperature": 0}
    answer = (await served.http.post("/v1/messages", json=asked)).json()
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == said["usage"]["prompt_tokens"]
    assert usage["cache_read_input_tokens"] > 0


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
