"""The vision encoder against loops over plain numbers, and its independence of batch mates."""

import numpy as np
import pytest
import torch
from epdserve.model.vision.encoder import PatchedImage
from support.vision import (
    patched,
    reference_embeddings,
    small_config,
    small_encoder,
    small_tensors,
)

CONFIG = small_config()
VISION = CONFIG.vision
assert VISION is not None
SIZES = [(20, 20), (37, 21), (10, 90), (64, 12), (1, 1), (61, 59)]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_embeddings_are_those_of_the_reference(width: int, height: int) -> None:
    image = patched(width, height, VISION)
    found = small_encoder().encode([image])[0]
    expected = reference_embeddings(image.pixels, VISION, small_tensors(CONFIG))
    assert found.shape == (image.shape.tokens, CONFIG.text.hidden_size)
    torch.testing.assert_close(found.double(), torch.from_numpy(expected), atol=2e-5, rtol=0)


def test_an_image_has_the_same_bits_alone_and_in_any_batch() -> None:
    encoder = small_encoder()
    images = [patched(*size, VISION, seed=seed) for seed, size in enumerate(SIZES)]
    alone = [encoder.encode([image])[0] for image in images]
    for batch in (images, images[::-1], images[2:4]):
        for image, found in zip(batch, encoder.encode(batch), strict=True):
            expected = alone[images.index(image)]
            assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_patches_of_a_42_pixel_image_lie_in_window_order() -> None:
    """spec/modules 7: nine patches of one window, rows first; a patch tells channel, then y, then x."""
    big = small_config().model_copy(
        update={"vision": VISION.model_copy(update={"patch_size": 14, "min_pixels": 42 * 42})}
    )
    from epdserve.model.vision.encoder import VisionEncoder

    encoder = VisionEncoder(big, small_tensors(big), b"f" * 16)
    image = patched(42, 42, big.vision)
    patches = encoder._patches(image)
    assert patches.shape == (9, 588)
    for index, (row, column) in enumerate((r, c) for r in range(3) for c in range(3)):
        part = image.pixels[row * 14 : row * 14 + 14, column * 14 : column * 14 + 14]
        values = torch.from_numpy(part.transpose(2, 0, 1).reshape(-1).astype(np.float32))
        assert torch.equal(patches[index], ((values / 255 - 0.5) / 0.5).to(torch.bfloat16).float())


def test_the_span_has_start_newlines_and_end_in_their_places() -> None:
    tensors = small_tensors(CONFIG)
    image = patched(61, 30, VISION)
    found = small_encoder().encode([image])[0]
    assert torch.equal(found[0], tensors["image_start"])
    assert torch.equal(found[-1], tensors["image_end"])
    line = image.shape.cells_x + 1
    for row in range(image.shape.cells_y):
        assert torch.equal(found[row * line + line], tensors["image_newline"])


def test_another_picture_of_the_same_size_gives_other_embeddings() -> None:
    encoder = small_encoder()
    one, other = encoder.encode([patched(30, 30, VISION, seed=1), patched(30, 30, VISION, seed=2)])
    assert (one - other).abs().max() > 0.1


def test_pixels_of_another_size_than_the_shape_are_refused() -> None:
    image = patched(30, 30, VISION)
    with pytest.raises(ValueError, match="pixels of shape"):
        small_encoder().encode([PatchedImage(image.shape, image.pixels[:-1])])


def test_no_image_is_no_work() -> None:
    assert small_encoder().encode([]) == []
