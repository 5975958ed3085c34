import base64

import deepseek_recipe as recipe
import numpy as np
import pytest
from epdserve.services.errors import InvalidRequest, PayloadTooLarge
from epdserve.services.router.images.config import ImageSettings
from epdserve.services.router.images.fetcher import ImageFetcher
from epdserve.services.router.images.pictures import Picture, PictureDesk, PromptImage, image_digest
from epdserve.services.types import token_ids
from support.vision import RELEASED, encoded, picture

PLACE, IMAGE = 900, 901


def desk(**settings: object) -> PictureDesk:
    limits = ImageSettings.model_validate(settings)
    return PictureDesk(RELEASED, limits, ImageFetcher(limits), placeholder_id=PLACE, image_token_id=IMAGE)


def source(data: bytes) -> recipe.ImageSource:
    return recipe.DataUrlImageSource("data:image/png;base64," + base64.b64encode(data).decode())


def shown(tokens: int, n: int = 0) -> Picture:
    return Picture(bytes([n]) * 32, tokens, b"x")


def test_each_place_holder_becomes_a_span() -> None:
    ids = token_ids([1, PLACE, 2, PLACE, PLACE])
    tokens, images = desk().place(ids, [shown(3, 1), shown(4, 2), shown(3, 3)])
    assert tokens.tolist() == [1, *[IMAGE] * 3, 2, *[IMAGE] * 7]
    assert [(image.first_token, image.tokens, image.picture.digest[0]) for image in images] == [
        (1, 3, 1),
        (5, 4, 2),
        (9, 3, 3),
    ]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_places_and_pictures_must_match(count: int) -> None:
    with pytest.raises(InvalidRequest, match="2 places"):
        desk().place(token_ids([PLACE, 5, PLACE]), [shown(3)] * count)


def test_images_are_found_again_when_ids_before_them_have_changed() -> None:
    images = (PromptImage(1, shown(3)), PromptImage(5, shown(4)))
    ids = token_ids([7, 8, 9, *[IMAGE] * 3, *[IMAGE] * 4, 1])
    assert [image.first_token for image in desk().relocate(ids, images)] == [3, 6]
    with pytest.raises(InvalidRequest, match="other images"):
        desk().relocate(token_ids(np.array([7, IMAGE, IMAGE])), images)


async def test_pictures_are_named_by_their_bytes_and_measured_from_their_headers() -> None:
    data, turned = encoded(picture(640, 480)), encoded(picture(480, 640))
    first, second, third = await desk().gather([source(data), source(turned), source(data)])
    assert (first.tokens, second.tokens) == (206, 210)
    assert first == third
    assert first.digest == image_digest(data) != second.digest
    assert len(first.digest) == 32


async def test_limits_on_number_and_size() -> None:
    data = encoded(picture(20, 20))
    with pytest.raises(InvalidRequest, match="3 images"):
        await desk(max_images=2).gather([source(data)] * 3)
    with pytest.raises(PayloadTooLarge, match="together"):
        await desk(max_total_bytes=len(data)).gather([source(data)] * 2)
    with pytest.raises(PayloadTooLarge) as caught:
        await desk(max_bytes=len(data) - 1).gather([source(data)])
    assert caught.value.param == "messages"
    with pytest.raises(PayloadTooLarge, match="pixels"):
        await desk(max_pixels=399).gather([source(data)])


async def test_the_first_bad_image_is_told() -> None:
    with pytest.raises(InvalidRequest, match="no PNG") as caught:
        await desk().gather([source(encoded(picture(9, 9))), source(b"hello")])
    assert caught.value.param == "messages"
    with pytest.raises(InvalidRequest, match="fetches no images"):
        await desk().gather([recipe.UrlImageSource("https://a.example/x.png")])
    with pytest.raises(InvalidRequest, match="data URLs or URLs"):
        await desk().gather([recipe.BytesImageSource(b"x")])
