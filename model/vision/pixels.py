"""Encoded images to pixels (spec/modules 3.5): what is taken, how it is turned, resized and padded. No torch.

An image is measured from its header first, so that a small file that claims to be huge is refused before a pixel of it
is decoded.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from epdserve.model.config import VisionConfig
from epdserve.model.errors import ImageError, ImageTooLarge
from epdserve.model.vision.geometry import ImageShape, fit_image
from PIL import Image, ImageOps, UnidentifiedImageError

PREPROCESSING_VERSION: Final = 1  # goes up with any change of what comes out of ``read_pixels``
FORMATS: Final = ("PNG", "JPEG", "GIF", "WEBP")
_EXIF: Final = b"Exif\0\0"
_MOST_EXIF: Final = 64  # a camera writes one, and one in each picture that it embeds
_PADDING: Final = (127, 127, 127)
_ORIENTATION: Final = 0x0112  # EXIF tag
_SIDEWAYS: Final = frozenset({5, 6, 7, 8})

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What is refused before it is decoded.

    Attributes:
        max_bytes: Of the encoded image.
        max_pixels: Of the image as it is stored.
        max_side: Likewise.
        max_frames: Of an animation; the first one is used.
    """

    max_bytes: int = 32 * 2**20
    max_pixels: int = 64_000_000
    max_side: int = 16_384
    max_frames: int = 1_000


def measure_image(data: bytes, config: VisionConfig, limits: ImageLimits) -> ImageShape:
    """Shape of an encoded image, from its header.

    Raises:
        ImageError: No image, or of a kind that is not taken.
        ImageTooLarge: A limit is exceeded.
    """
    with _opened(data, limits) as image:
        return _shape(image, config)


def read_pixels(data: bytes, config: VisionConfig, limits: ImageLimits) -> tuple[ImageShape, Pixels]:
    """Decode, turn upright, resize and pad an image.

    Returns:
        Its shape, and (height, width, 3) uint8 red, green, blue; transparency is dropped.

    Raises:
        ImageError: No image, of a kind that is not taken, or damaged.
        ImageTooLarge: A limit is exceeded.
    """
    with _opened(data, limits) as image:
        shape = _shape(image, config)
        upright = ImageOps.exif_transpose(_to_rgb(image)) if _orientation(image) != 1 else _to_rgb(image)
        fitted = ImageOps.pad(
            upright, (shape.width, shape.height), method=Image.Resampling.BICUBIC, color=_PADDING
        )
        return shape, np.asarray(fitted)


@contextmanager
def _opened(data: bytes, limits: ImageLimits) -> Iterator[Image.Image]:
    if len(data) > limits.max_bytes:
        raise ImageTooLarge(f"an image has {len(data)} bytes, {limits.max_bytes} are taken")
    if data.count(_EXIF) > _MOST_EXIF:
        # Pillow joins a JPEG's Exif segments one by one: 3 MB of small ones cost it seconds, without a pixel
        raise ImageError(f"an image has more than {_MOST_EXIF} Exif segments")
    try:
        with warnings.catch_warnings():
            # Pillow warns of large images and of odd metadata; size is our own check below.
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                _check_size(image, limits)
                yield image
    except UnidentifiedImageError:
        raise ImageError(f"{len(data)} bytes are no PNG, JPEG, GIF or WebP image") from None
    except Image.DecompressionBombError as error:
        raise ImageTooLarge(str(error)) from None
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, OverflowError) as error:
        # What its decoders raise on damaged data; SyntaxError is how the PNG one tells of a broken chunk.
        raise ImageError(f"the image is damaged: {str(error)[:100]}") from None


def _check_size(image: Image.Image, limits: ImageLimits) -> None:
    width, height = image.size
    if width * height > limits.max_pixels:
        raise ImageTooLarge(f"an image has {width}x{height} pixels, {limits.max_pixels} are taken")
    if max(width, height) > limits.max_side:
        raise ImageTooLarge(f"an image has {width}x{height} pixels, a side may have {limits.max_side}")
    frames = int(getattr(image, "n_frames", 1))
    if frames > limits.max_frames:
        raise ImageTooLarge(f"an animation has {frames} frames, {limits.max_frames} are taken")
    if frames > 1:
        image.seek(0)


def _shape(image: Image.Image, config: VisionConfig) -> ImageShape:
    width, height = image.size
    if _orientation(image) in _SIDEWAYS:
        width, height = height, width
    try:
        return fit_image(width, height, config)
    except ValueError as error:
        raise ImageError(str(error)) from None


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 if there is none; of what stands before the pixels, so that none is decoded for it."""
    raw = image.info.get("exif")
    if not isinstance(raw, bytes):
        return 1
    exif = Image.Exif()
    exif.load(raw)
    orientation = exif.get(_ORIENTATION, 1)
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits a sample: conversion would clip instead of scaling
        high = np.asarray(image).astype(np.uint32).clip(0, 65_535) >> 8
        grey = Image.fromarray(high.astype(np.uint8))
        grey.info = image.info
        return grey.convert("RGB")
    if image.mode in ("P", "PA"):
        return image.convert("RGBA").convert("RGB")
    return image.convert("RGB")
