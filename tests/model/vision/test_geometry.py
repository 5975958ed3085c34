"""Span lengths against the published library's own count, which takes a size as it comes out of its preprocessing."""

import deepseek_recipe as recipe
import pytest
from epdserve.model.vision.geometry import fit_image
from hypothesis import given, settings
from hypothesis import strategies as st
from support.vision import RELEASED

# width, height, tokens; the first eleven stand in spec/modules 3.5
TABLE = [
    (32, 32, 184),
    (224, 224, 184),
    (448, 448, 184),
    (544, 544, 184),
    (640, 480, 206),
    (800, 600, 317),
    (1024, 768, 496),
    (1024, 1024, 652),
    (1280, 720, 578),
    (1302, 1302, 994),
    (2048, 2048, 994),
    (1920, 1080, 968),
    (3840, 2160, 968),
    (100, 4000, 386),
    (4000, 100, 293),
    (5000, 20, 208),
    (1, 1, None),
    (1, 2, None),
    (2, 1, None),
    (13, 15, None),
    (41, 43, None),
    (545, 543, None),
    (546, 546, None),
    (547, 545, None),
    (601, 799, None),
    (1303, 1301, None),
    (999, 1001, None),
    (1365, 767, None),
    (480, 640, None),
    (1080, 1920, None),
    (2160, 3840, None),
    (1, 20000, 1024),
    (20000, 1, 1024),
    (3, 20000, None),
    (642, 4, 171),
    (5339, 33, None),
    (4636, 50, None),
    (27, 8109, None),
    (20000, 20000, None),
    (12345, 6789, None),
]


def own_count(width: int, height: int) -> int:
    """The library's: one place holder is counted already."""
    return recipe.MultiModalData([recipe.ImageInfo(b"", width, height)]).image_token_adjustment() + 1


@pytest.mark.parametrize(("width", "height", "tokens"), TABLE)
def test_spans_are_as_long_as_the_published_library_says(width: int, height: int, tokens: int | None) -> None:
    shape = fit_image(width, height, RELEASED)
    assert shape.tokens == own_count(width, height)
    assert tokens is None or shape.tokens == tokens
    assert shape.tokens <= RELEASED.max_image_tokens
    assert (shape.columns * 14, shape.rows * 14) == (shape.width, shape.height)


def test_the_table_has_forty_sizes() -> None:
    assert len(TABLE) == 40


@given(st.integers(1, 20_000), st.integers(1, 20_000))
@settings(max_examples=300, deadline=None)
def test_any_size_has_the_span_of_the_published_library(width: int, height: int) -> None:
    assert fit_image(width, height, RELEASED).tokens == own_count(width, height)


@pytest.mark.parametrize(
    ("size", "resized", "patches", "cells"),
    [
        ((640, 480), (644, 490), (46, 35), (16, 12)),
        ((1920, 1080), (1708, 966), (122, 69), (41, 23)),
        ((5000, 20), (8610, 42), (615, 3), (205, 1)),
    ],
)
def test_sizes_in_pixels_patches_and_cells(
    size: tuple[int, int], resized: tuple[int, int], patches: tuple[int, int], cells: tuple[int, int]
) -> None:
    shape = fit_image(*size, RELEASED)
    assert (shape.width, shape.height) == resized
    assert (shape.columns, shape.rows) == patches
    assert (shape.cells_x, shape.cells_y) == cells


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 5)])
def test_a_side_without_pixels_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no content"):
        fit_image(*size, RELEASED)


def test_a_limit_on_proportions_is_kept() -> None:
    limited = RELEASED.model_copy(update={"max_wh_ratio": 4.0})
    assert fit_image(400, 100, limited).tokens
    with pytest.raises(ValueError, match="factor of 4"):
        fit_image(401, 100, limited)
