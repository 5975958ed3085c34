"""From the image parts of a conversation to spans in its prompt.

Files are fetched or unpacked, named by a digest and measured from their headers; pixels are decoded by encode workers
alone. Each image's one place holder in the rendered prompt then becomes as many image tokens as its span has.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import deepseek_recipe as recipe
import numpy as np
from epdserve.model.config import VisionConfig
from epdserve.model.errors import ImageError, ImageTooLarge
from epdserve.model.vision.pixels import PREPROCESSING_VERSION, ImageLimits, measure_image
from epdserve.services.errors import InvalidRequest, PayloadTooLarge, ServiceError
from epdserve.services.router.images.budget import BytesLeft
from epdserve.services.router.images.config import ImageSettings
from epdserve.services.router.images.fetcher import ImageFetcher
from epdserve.services.router.images.urls import read_data_url
from epdserve.services.types import TokenIds, token_ids

_PARAM: Final = "messages"


@dataclass(frozen=True, slots=True)
class Picture:
    """An image of a request, named and measured."""

    digest: bytes
    tokens: int
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class PromptImage:
    """A picture in a prompt, from ``first_token`` on."""

    first_token: int
    picture: Picture

    @property
    def tokens(self) -> int:
        """Length of its span."""
        return self.picture.tokens


class PictureDesk:
    """Owned by one event loop.

    Args:
        vision: Of the model; decides the length of spans.
        placeholder_id: What the renderer writes for an image.
        image_token_id: What stands in a prompt for every place of a span.
    """

    def __init__(
        self,
        vision: VisionConfig,
        settings: ImageSettings,
        fetcher: ImageFetcher,
        *,
        placeholder_id: int,
        image_token_id: int,
    ) -> None:
        self._vision, self._settings, self._fetcher = vision, settings, fetcher
        self._placeholder_id, self._image_token_id = placeholder_id, image_token_id
        self._limits = ImageLimits(
            settings.max_bytes, settings.max_pixels, settings.max_side, settings.max_frames
        )
        self._spans: OrderedDict[bytes, int] = OrderedDict()

    async def gather(self, sources: Sequence[recipe.ImageSource]) -> list[Picture]:
        """The pictures of a request, in order.

        Raises:
            InvalidRequest: Too many, or one cannot be had, is no image, or is damaged in its header.
            PayloadTooLarge: One of them, or all together, are too large.
        """
        if len(sources) > self._settings.max_images:
            raise InvalidRequest(
                f"the messages hold {len(sources)} images, {self._settings.max_images} are taken",
                param=_PARAM,
            )
        budget = BytesLeft(self._settings.max_total_bytes)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._data(source, budget)) for source in sources]
        except* ServiceError as errors:
            raise _first(errors) from None
        files = [task.result() for task in tasks]
        return await asyncio.to_thread(lambda: [self._measured(data) for data in files])

    def place(
        self, tokens: TokenIds, pictures: Sequence[Picture]
    ) -> tuple[TokenIds, tuple[PromptImage, ...]]:
        """Ids with each place holder replaced by its picture's span, and where the pictures begin.

        Raises:
            InvalidRequest: There are not as many place holders as pictures.
        """
        places = np.flatnonzero(tokens == self._placeholder_id)
        if len(places) != len(pictures):
            raise InvalidRequest(
                f"the prompt has {len(places)} places for {len(pictures)} images", param=_PARAM
            )
        parts, images, done, at = [], [], 0, 0
        for place, picture in zip(places.tolist(), pictures, strict=True):
            parts += [tokens[done:place], np.full(picture.tokens, self._image_token_id, dtype=np.int32)]
            at += place - done
            images.append(PromptImage(at, picture))
            at, done = at + picture.tokens, place + 1
        return token_ids(np.concatenate([*parts, tokens[done:]])), tuple(images)

    def relocate(self, tokens: TokenIds, images: Sequence[PromptImage]) -> tuple[PromptImage, ...]:
        """The same images, where they are after ids before them have changed.

        Raises:
            InvalidRequest: The ids do not hold these images.
        """
        places = np.flatnonzero(tokens == self._image_token_id)
        if len(places) != sum(image.tokens for image in images):
            raise InvalidRequest("the prompt has other images than the request", param=_PARAM)
        moved, at = [], 0
        for image in images:
            moved.append(PromptImage(int(places[at]), image.picture))
            at += image.tokens
        return tuple(moved)

    async def _data(self, source: recipe.ImageSource, budget: BytesLeft) -> bytes:
        try:
            if source.data_url is not None:
                data = read_data_url(source.data_url, max_bytes=self._settings.max_bytes)
                budget.take(len(data))
                return data
            if source.url is not None:
                return await self._fetcher.fetch(source.url, budget)
        except ServiceError as error:
            error.param = _PARAM
            raise
        raise InvalidRequest("images are taken as data URLs or URLs", param=_PARAM)

    def _measured(self, data: bytes) -> Picture:
        """In a thread; equal files have equal spans, so that each is measured once."""
        digest = image_digest(data)
        tokens = self._spans.get(digest)
        if tokens is None:
            try:
                tokens = measure_image(data, self._vision, self._limits).tokens
            except ImageTooLarge as error:
                raise PayloadTooLarge(str(error), param=_PARAM) from None
            except ImageError as error:
                raise InvalidRequest(str(error), param=_PARAM) from None
            self._spans[digest] = tokens
            if len(self._spans) > self._settings.remembered:
                self._spans.popitem(last=False)
        return Picture(digest, tokens, data)


def image_digest(data: bytes) -> bytes:
    """Name of an image: its file's bytes and the version of what is made of them."""
    return hashlib.sha256(PREPROCESSING_VERSION.to_bytes(4, "little") + data).digest()


def _first(errors: BaseExceptionGroup[ServiceError]) -> ServiceError:
    found = errors.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found
