"""An encode worker dies of SIGKILL while an image chat waits for it: one retry, elsewhere (real processes)."""

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from epdserve.services.policy.encoding import EncodeLoad, choose_encoder
from epdserve.services.router.images.pictures import image_digest
from support.image_chat import ENCODE, Served, answered, image, served_images, text, tokens_of, user
from support.pools import CALL_S
from support.vision import encoded, picture

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.integration]

LOADS = [EncodeLoad("encode-0", 0), EncodeLoad("encode-1", 0)]


@pytest_asyncio.fixture(loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with served_images(tmp_path_factory.mktemp("deaths")) as served:
        await served.live.spawn("encode-1", ENCODE, {}, model_dir=str(served.model_dir), cache_bytes=2**22)
        yield served


def at_home_with(worker: str, seed: int) -> bytes:
    """A picture that the router sends to ``worker``, of the two."""
    while True:
        data = encoded(picture(40, 30, seed=seed))
        if choose_encoder(image_digest(data), LOADS) == worker:
            return data
        seed += 1


async def test_an_encode_worker_that_dies_under_an_image_costs_one_retry(served: Served) -> None:
    data = at_home_with("encode-1", 100)
    messages = [user(text("What is this?"), image(data))]
    ids = await tokens_of(served, messages)
    expected = await answered(served, ids, [data], count=5)
    served.live.signal("encode-1", signal.SIGSTOP)  # so that it has the image and has not answered
    running = asyncio.create_task(served.chat(messages, receipt=True))
    asked = 'epdserve_embedding_lookups_total{outcome="miss"}'
    await asyncio.sleep(0.5)
    assert not running.done()
    assert await served.live.metric("encode-0", asked) == 0
    served.live.signal("encode-1", signal.SIGKILL)
    async with asyncio.timeout(CALL_S):
        answer = (await running).json()
    assert answer["choices"][0]["message"]["content"] == expected
    assert await served.live.metric("encode-0", asked) == 1
    await served.live.assert_conserved("prefill-0", "decode-0", "encode-0")
    # The life that failed is left alone: the next image of its home is not lost first
    other = (await served.chat([user(image(at_home_with("encode-1", 200)))])).json()
    assert other["usage"]["completion_tokens"] > 0
    assert await served.live.metric("encode-0", asked) == 2
