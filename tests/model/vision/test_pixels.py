import struct
import zlib

import deepseek_recipe as recipe
import numpy as np
import pytest
from epdserve.model.config import VisionConfig
from epdserve.model.errors import ImageError, ImageTooLarge
from epdserve.model.vision.geometry import fit_image
from epdserve.model.vision.pixels import ImageLimits, measure_image, read_pixels
from PIL import Image, ImageOps
from support.vision import RELEASED, SMALL, encoded, picture

CONFIG = VisionConfig.model_validate(SMALL)
LIMITS = ImageLimits()


def read(data: bytes) -> np.ndarray:
    return read_pixels(data, CONFIG, LIMITS)[1]


def content(data: bytes) -> np.ndarray:
    """Pixels without the padding at the edges."""
    return read(data)[2:-2, 4:-4]


def turned(image: Image.Image, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, "PNG", exif=exif)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_each_format_gives_about_the_same_pixels(kind: str) -> None:
    image = Image.fromarray(np.full((24, 32, 3), (200, 100, 50), np.uint8))
    values = read(encoded(image, kind))
    assert np.abs(values.astype(int) - (200, 100, 50)).max() < 8


def test_pixels_are_those_of_pillows_pad() -> None:
    image = picture(45, 37)
    shape = fit_image(45, 37, CONFIG)
    expected = ImageOps.pad(
        image, (shape.width, shape.height), method=Image.Resampling.BICUBIC, color=(127, 127, 127)
    )
    assert np.array_equal(read(encoded(image)), np.asarray(expected))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_before_the_size_is_measured(orientation: int) -> None:
    upright = picture(60, 21)
    stored = {
        1: upright,
        2: ImageOps.mirror(upright),
        3: upright.rotate(180),
        4: ImageOps.flip(upright),
        5: upright.transpose(Image.Transpose.TRANSPOSE),
        6: upright.transpose(Image.Transpose.ROTATE_90),
        7: upright.transpose(Image.Transpose.TRANSVERSE),
        8: upright.transpose(Image.Transpose.ROTATE_270),
    }[orientation]
    data = turned(stored, orientation)
    assert measure_image(data, CONFIG, LIMITS) == fit_image(60, 21, CONFIG)
    assert np.array_equal(read(data), read(encoded(upright)))


@pytest.mark.parametrize("orientation", [0, 9, 77])
def test_an_orientation_that_does_not_exist_is_none(orientation: int) -> None:
    assert np.array_equal(read(turned(picture(30, 20), orientation)), read(encoded(picture(30, 20))))


@pytest.mark.parametrize(("width", "height"), [(400, 300), (301, 77), (33, 650)])
def test_a_turned_picture_has_the_span_the_library_counts_for_it_upright(width: int, height: int) -> None:
    upright = recipe.MultiModalData([recipe.ImageInfo(b"", height, width)]).image_token_adjustment() + 1
    assert measure_image(turned(picture(width, height), 6), RELEASED, LIMITS).tokens == upright


def test_the_library_resizes_to_the_same_sizes() -> None:
    data = encoded(picture(301, 77))
    own = recipe.OpenCvImagePreprocessor().preprocess(data, recipe.PreprocessOptions("high", 8192, 512))
    shape = measure_image(data, RELEASED, LIMITS)
    assert (shape.width, shape.height) == (own.width, own.height)


def test_transparency_is_dropped() -> None:
    rgba = np.zeros((20, 30, 4), np.uint8)
    rgba[..., 0], rgba[..., 3] = 200, 0
    assert content(encoded(Image.fromarray(rgba)))[..., 0].min() == 200


def test_a_palette_becomes_its_colours() -> None:
    image = Image.new("P", (30, 20), 1)
    image.putpalette([0, 0, 0, 10, 220, 30])
    assert np.unique(content(encoded(image)).reshape(-1, 3), axis=0).tolist() == [[10, 220, 30]]
    transparent = content(encoded(image, transparency=1))
    assert np.unique(transparent.reshape(-1, 3), axis=0).tolist() == [[10, 220, 30]]


def test_cmyk_becomes_its_colours() -> None:
    image = Image.new("CMYK", (32, 24), (0, 255, 255, 0))
    values = content(encoded(image, "JPEG"))
    assert values[..., 0].min() > 200
    assert values[..., 1:].max() < 60


def test_sixteen_bits_are_scaled_and_not_clipped() -> None:
    grey = Image.fromarray(np.full((20, 30), 0x8000, np.uint16))
    assert np.unique(content(encoded(grey))).tolist() == [0x80]


@pytest.mark.parametrize("mode", ["1", "L", "LA"])
def test_grey_pictures_have_three_equal_channels(mode: str) -> None:
    values = read(encoded(picture(30, 20).convert("L").convert(mode)))
    assert np.array_equal(values[..., 0], values[..., 1])
    assert values.max() > values.min()


def test_of_an_animation_the_first_frame_is_taken() -> None:
    frames = [Image.new("RGB", (30, 20), color) for color in ((250, 0, 0), (0, 250, 0))]
    for kind in ("GIF", "WEBP", "PNG"):
        values = content(encoded(frames[0], kind, save_all=True, append_images=frames[1:]))
        assert values[..., 0].min() > 200, kind


def test_an_image_of_one_pixel_is_taken() -> None:
    assert read(encoded(Image.new("RGB", (1, 1), (9, 9, 9)))).shape == (20, 20, 3)


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"%PDF-1.4\n", b"\x89PNG\r\n\x1a\n", b"<svg/>", b"BM" + bytes(60)]
)
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(ImageError):
        measure_image(data, CONFIG, LIMITS)


@pytest.mark.parametrize("kind", ["BMP", "TIFF"])
def test_other_formats_are_refused(kind: str) -> None:
    with pytest.raises(ImageError, match="PNG, JPEG, GIF or WebP"):
        measure_image(encoded(picture(30, 20), kind), CONFIG, LIMITS)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_a_truncated_image_is_refused(kind: str) -> None:
    data = encoded(picture(64, 64), kind)
    for end in (len(data) // 4, len(data) // 2, len(data) - 40):
        with pytest.raises(ImageError):
            read(data[:end])


def test_a_bomb_is_refused_from_its_header() -> None:
    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", 16_000, 16_000, 8, 2, 0, 0, 0)
    bomb = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(100_000)))
        + chunk(b"IEND", b"")
    )
    for refuse in (measure_image, read_pixels):
        with pytest.raises(ImageTooLarge, match=r"16000x16000|256000000 pixels"):
            refuse(bomb, CONFIG, LIMITS)


def test_a_header_that_takes_seconds_to_join_is_refused_before_it_is() -> None:
    data = encoded(picture(30, 20), "JPEG")
    body = b"Exif\0\0II*\0\x08\0\0\0" + bytes(12)
    segment = b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body
    assert measure_image(data[:2] + segment * 64 + data[2:], CONFIG, LIMITS)
    for refuse in (measure_image, read_pixels):
        with pytest.raises(ImageError, match="Exif"):
            refuse(data[:2] + segment * 100_000 + data[2:], CONFIG, LIMITS)


@pytest.mark.parametrize(
    ("limits", "match"),
    [
        (ImageLimits(max_bytes=100), "bytes"),
        (ImageLimits(max_pixels=500), "pixels"),
        (ImageLimits(max_side=29), "side"),
    ],
)
def test_each_limit_is_kept(limits: ImageLimits, match: str) -> None:
    with pytest.raises(ImageTooLarge, match=match):
        measure_image(encoded(picture(30, 20)), CONFIG, limits)


def test_the_number_of_frames_is_limited() -> None:
    frames = [picture(8, 8, seed=seed) for seed in range(5)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert measure_image(data, CONFIG, ImageLimits(max_frames=5))
    with pytest.raises(ImageTooLarge, match="frames"):
        measure_image(data, CONFIG, ImageLimits(max_frames=4))


@pytest.mark.parametrize("seed", range(40))
def test_damaged_bytes_are_refused_or_read_and_nothing_else(seed: int) -> None:
    draw = np.random.default_rng(seed)
    kind = ("PNG", "JPEG", "GIF", "WEBP")[seed % 4]
    data = bytearray(encoded(picture(40, 30), kind))
    for place in draw.integers(0, len(data), 6):
        data[place] = int(draw.integers(0, 256))
    try:
        shape, pixels = read_pixels(bytes(data), CONFIG, LIMITS)
    except ImageError:
        return
    assert pixels.shape == (shape.height, shape.width, 3)
