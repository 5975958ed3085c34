"""Images through encode, prefill and decode workers, over real gRPC and NIXL; the measure is one process."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from epdserve.services.errors import InvalidRequest, LeaseLost, PayloadTooLarge, ServiceError, WorkerLost
from epdserve.services.image_types import EmbeddingWish, EncodeImage, EncodeJob, EncodeResult, PlacedImage
from epdserve.services.rpc.encode_client import EncodeClient
from epdserve.services.types import WorkerInfo
from support.engine import greedy, prompt
from support.pools import CALL_S, DECODE, PREFILL, TOKEN, Pools, engine_table, pools
from support.vision import Shown, encoded, greedy_with_images, picture, show, write_vision_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.integration]

ENCODE = "epdserve.services.encode.service"
CAT, DOG = Shown.of(encoded(picture(50, 40, seed=1))), Shown.of(encoded(picture(50, 40, seed=2), "JPEG"))
STRIP = Shown.of(encoded(picture(90, 9, seed=3), "WEBP"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(tmp_path_factory: pytest.TempPathFactory, model: Path) -> AsyncIterator[Pools]:
    engine = engine_table(model_dir=str(model), chunk_tokens=16)
    async with pools(tmp_path_factory.mktemp("pools")) as live:
        await live.start("encode-0", ENCODE, model_dir=str(model), cache_bytes=2**20)
        await live.start("prefill-0", PREFILL, engine=engine, images={"fetch_deadline_s": 5.0})
        await live.start("prefill-1", PREFILL, engine=engine, images={"mode": "local"})
        await live.start("decode-0", DECODE, engine=engine)
        await live.listed("prefill-1")
        yield live


async def encode(live: Pools, info: WorkerInfo, *images: EncodeImage) -> EncodeResult:
    async with EncodeClient(info.address, token=TOKEN, worker=info.worker) as client:
        return await client.run(EncodeJob("e", images), deadline_s=CALL_S)


def asked(image: Shown) -> EncodeImage:
    return EncodeImage(image.digest, image.tokens, image.data)


def placed(images: list[tuple[int, Shown]], encoder: WorkerInfo) -> tuple[PlacedImage, ...]:
    return tuple(
        PlacedImage(at, image.tokens, image.digest, encoder.worker, encoder.incarnation)
        for at, image in images
    )


async def answer(
    live: Pools,
    ids: np.ndarray,
    images: list[tuple[int, Shown]],
    *,
    prefill: str,
    encoder: str,
    count: int = 4,
) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt were cached."""
    info = await live.listed(encoder)
    places = placed(images, info)
    running = asyncio.create_task(live.prefill(prefill, ids, images=places))
    await encode(live, info, *(asked(image) for _, image in images))
    result = await running
    job = live.job(ids, greedy(count), result.handle, images=places)
    tokens, last = await live.decode("decode-0", job)
    assert last.receipt is not None
    assert last.receipt.recomputed_tokens == 0
    return tokens, result.cached_tokens


@pytest.mark.parametrize(("prefill", "encoder"), [("prefill-0", "encode-0"), ("prefill-1", "prefill-1")])
async def test_an_image_chat_equals_one_process_cold_and_with_hits(
    live: Pools, prefill: str, encoder: str
) -> None:
    ids, images = show(prompt(21, 1), CAT, prompt(9, 2), STRIP, prompt(11, 3))
    for turn in range(2):
        tokens, cached = await answer(live, ids, images, prefill=prefill, encoder=encoder)
        assert tokens == greedy_with_images(ids, images, 4, hit=cached)
        assert (cached > 0) == (turn > 0)
    fetched = 'epdserve_image_fetches_total{outcome="%s"}' % ("pulled" if prefill == "prefill-0" else "local")
    assert await live.metric(prefill, fetched) >= 2
    await live.assert_conserved(prefill, "decode-0", "encode-0")


async def test_the_same_picture_is_embedded_once(live: Pools) -> None:
    name = 'epdserve_embedding_lookups_total{outcome="hit"}'
    info = await live.listed("encode-0")
    await encode(live, info, asked(DOG))
    before = await live.metric("encode-0", name)
    patches = await live.metric("encode-0", "epdserve_encode_patches_total")
    again = await encode(live, info, EncodeImage(DOG.digest, DOG.tokens), EncodeImage(bytes(32), 5))
    assert again == EncodeResult(1, (bytes(32),))
    assert await live.metric("encode-0", name) == before + 1
    assert await live.metric("encode-0", "epdserve_encode_patches_total") == patches


async def test_another_picture_of_the_same_size_hits_nothing_behind_it(live: Pools) -> None:
    text, rest = prompt(24, 5), prompt(16, 6)
    ids, images = show(text, CAT, rest)
    other_ids, others = show(text, DOG, rest)
    assert ids.tolist() == other_ids.tolist()
    await answer(live, ids, images, prefill="prefill-0", encoder="encode-0", count=1)
    tokens, cached = await answer(live, ids, others, prefill="prefill-0", encoder="encode-0")
    assert cached <= 24
    assert tokens == greedy_with_images(ids, others, 4)


async def test_a_picture_that_was_fetched_a_moment_ago_is_not_fetched_again(live: Pools) -> None:
    recent, nbytes = 'epdserve_image_fetches_total{outcome="recent"}', "epdserve_image_fetch_bytes_total"
    first, second = (show(prompt(19, seed), CAT, prompt(7, seed + 1)) for seed in (30, 32))
    await answer(live, *first, prefill="prefill-0", encoder="encode-0", count=1)
    before, pulled = await live.metric("prefill-0", recent), await live.metric("prefill-0", nbytes)
    tokens, cached = await answer(live, *second, prefill="prefill-0", encoder="encode-0")
    assert await live.metric("prefill-0", recent) == before + 1
    assert await live.metric("prefill-0", nbytes) == pulled
    assert tokens == greedy_with_images(*second, 4, hit=cached)


async def test_text_before_an_image_is_computed_while_it_is_made(live: Pools) -> None:
    ids, images = show(prompt(48, 7), Shown.of(encoded(picture(44, 41, seed=9))), prompt(8, 8))
    info, rows = await live.listed("encode-0"), 'epdserve_engine_rows_total{kind="prefill"}'
    before = await live.metric("prefill-0", rows)
    running = asyncio.create_task(live.prefill("prefill-0", ids, images=placed(images, info)))
    async with asyncio.timeout(CALL_S):
        while await live.metric("prefill-0", rows) < before + 48:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    assert await live.metric("prefill-0", rows) == before + 48
    assert not running.done()
    await encode(live, info, asked(images[0][1]))
    result = await running
    assert result.computed_tokens == len(ids)
    client = await live.client("prefill-0")
    await client.release_lease(result.handle.lease, incarnation=result.handle.incarnation, deadline_s=CALL_S)


async def test_an_image_that_nobody_brings_ends_the_prompt_and_leaves_nothing(live: Pools) -> None:
    ids, images = show(prompt(20, 11), Shown.of(encoded(picture(30, 31, seed=12))), prompt(4, 13))
    info = await live.listed("encode-0")
    with pytest.raises(ServiceError, match="no embeddings"):
        await live.prefill("prefill-0", ids, images=placed(images, info))
    await live.assert_conserved("prefill-0", "encode-0")


async def test_a_life_of_an_encode_worker_that_is_gone_is_told_by_name(live: Pools) -> None:
    new = Shown.of(encoded(picture(33, 29, seed=14)))
    ids, _ = show(prompt(20, 14), new)
    place = PlacedImage(20, new.tokens, new.digest, "encode-0", "0")
    with pytest.raises(WorkerLost) as caught:
        await live.prefill("prefill-0", ids, images=(place,))
    assert caught.value.worker == "encode-0"
    await live.assert_conserved("prefill-0")


async def test_a_decode_worker_does_not_guess_what_an_image_was(live: Pools) -> None:
    ids, images = show(prompt(20, 15), STRIP, prompt(3, 16))
    info = await live.listed("encode-0")
    with pytest.raises(LeaseLost):
        await live.decode("decode-0", live.job(ids, greedy(3), None, images=placed(images, info)))
    await live.assert_conserved("decode-0")


@pytest.mark.parametrize("encoder", ["encode-0", "prefill-1"])
@pytest.mark.parametrize(
    ("data", "tokens", "error"),
    [
        (b"", 30, None),
        (b"no image", 30, InvalidRequest),
        (CAT.data[: len(CAT.data) // 2], CAT.tokens, InvalidRequest),
        (CAT.data, CAT.tokens + 1, InvalidRequest),
        (bytes(32 * 2**20 + 1), 30, PayloadTooLarge),
    ],
    ids=["empty", "text", "truncated", "mismatch", "large"],
)
async def test_bad_images_are_refused_and_leave_nothing(
    live: Pools, encoder: str, data: bytes, tokens: int, error: type[ServiceError] | None
) -> None:
    info, digest = await live.listed(encoder), bytes([7]) * 32
    if error is None:
        assert (await encode(live, info, EncodeImage(digest, tokens, data))).missing == (digest,)
    else:
        with pytest.raises(error):
            await encode(live, info, EncodeImage(digest, tokens, data))
    assert (await encode(live, info, EncodeImage(digest, tokens))).missing == (digest,)
    assert (await encode(live, info, asked(CAT))).missing == ()


async def test_a_model_of_another_vision_encoder_gets_nothing(live: Pools) -> None:
    info = await live.listed("encode-0")
    await encode(live, info, asked(CAT))
    async with EncodeClient(info.address, token=TOKEN, worker=info.worker) as client:
        with pytest.raises(ServiceError, match="another model"):
            await client.lend(EmbeddingWish(CAT.digest, CAT.tokens, b"x" * 16), deadline_s=2.0)


async def test_an_image_must_stand_where_image_tokens_are(live: Pools) -> None:
    info = await live.listed("encode-0")
    with pytest.raises(InvalidRequest, match="prompt has text"):
        await live.prefill("prefill-0", prompt(60, 1), images=placed([(10, CAT)], info))
