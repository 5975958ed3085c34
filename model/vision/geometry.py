"""How large an image becomes, and how many tokens it takes (spec/modules 3.4 and 3.5). Integers only, no pixels.

A prompt's length depends on it, so a router computes it as well as an encode worker: no torch here.
"""

import math
from dataclasses import dataclass
from typing import Final

from epdserve.model.config import VisionConfig

_MOST_FITS: Final = 64  # the worst of 60,000 sizes took 16


@dataclass(frozen=True, slots=True)
class ImageShape:
    """An image as the vision encoder takes it.

    Attributes:
        width, height: In pixels, after resizing and padding; multiples of the patch size.
        columns, rows: Patches.
        cells_x, cells_y: Merged cells: windows of ``downsample_ratio`` patches a side, the last ones padded.
    """

    width: int
    height: int
    columns: int
    rows: int
    cells_x: int
    cells_y: int

    @property
    def patches(self) -> int:
        """Patches in all."""
        return self.columns * self.rows

    @property
    def tokens(self) -> int:
        """Length of the span: start, each row of cells with a newline after it, end."""
        return self.cells_y * (self.cells_x + 1) + 2


def fit_image(width: int, height: int, config: VisionConfig) -> ImageShape:
    """Shape of an image of ``width`` x ``height`` pixels, orientation applied.

    Raises:
        ValueError: A side that is not positive, or sides whose ratio exceeds ``max_wh_ratio``.
    """
    if width <= 0 or height <= 0:
        raise ValueError(f"an image of {width}x{height} pixels has no content")
    if config.max_wh_ratio is not None and max(width, height) > config.max_wh_ratio * min(width, height):
        raise ValueError(f"sides {width}x{height} differ by more than a factor of {config.max_wh_ratio}")
    for _ in range(_MOST_FITS):
        fitted = _fit(width, height, config)
        if fitted == (width, height):
            return _shape(width, height, config)
        width, height = fitted
    raise ValueError(f"no size for an image of {width}x{height} pixels")


def _fit(width: int, height: int, config: VisionConfig) -> tuple[int, int]:
    if width * height < config.min_pixels:
        scale = math.sqrt(config.min_pixels / (width * height))
        width, height = int(width * scale), int(height * scale)
    shape = _shape(_round_up(width, config.patch_size), _round_up(height, config.patch_size), config)
    if shape.tokens <= config.max_image_tokens:
        return shape.width, shape.height
    return _shrink(width, height, config)


def _shrink(width: int, height: int, config: VisionConfig) -> tuple[int, int]:
    """The largest size of about these proportions whose span is within ``max_image_tokens``."""
    patch, cell = config.patch_size, config.patch_size * config.downsample_ratio
    room = config.max_image_tokens - 2
    ratio = height / width
    most_x = math.sqrt(room / ratio + 0.25) - 0.5
    most_y = most_x * ratio
    if most_x < 1:
        return cell, room // 2 * cell
    if most_y < 1:
        return (room - 1) * cell, cell
    shrink = min(math.floor(most_x) * cell / width, math.floor(most_y) * cell / height)
    return math.floor(shrink * width / patch) * patch, math.floor(shrink * height / patch) * patch


def _shape(width: int, height: int, config: VisionConfig) -> ImageShape:
    columns, rows = width // config.patch_size, height // config.patch_size
    merge = config.downsample_ratio
    return ImageShape(width, height, columns, rows, -(-columns // merge), -(-rows // merge))


def _round_up(side: int, multiple: int) -> int:
    return -(-side // multiple) * multiple
