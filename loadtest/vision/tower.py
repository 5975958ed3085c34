"""The vision encoder of the demo model on one CPU thread: eight images of 448 px in one batch against one by one.

    python -m epdserve.loadtest.vision.tower [MODEL_DIR]

Times are CPU seconds of this process, the least of some rounds, so that a busy machine changes little. Then where they
go, by operation, and what a hand-off of 10 MB costs beside a copy of the same bytes in this process.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch
from epdserve.model.config import ModelConfig
from epdserve.model.demo.writer import write_demo_model
from epdserve.model.vision.encoder import PatchedImage, VisionEncoder
from epdserve.model.vision.geometry import fit_image
from torch.profiler import ProfilerActivity, profile

_IMAGES: Final = 8
_SIDE: Final = 448
_ROUNDS: Final = 5


def cpu_s(work: Callable[[], object], rounds: int = _ROUNDS) -> float:
    """Least CPU time of some rounds."""
    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best


def images_of(encoder: VisionEncoder) -> list[PatchedImage]:
    """Noise of the size that an image of 448 px becomes."""
    shape, draw = fit_image(_SIDE, _SIDE, encoder.config), np.random.default_rng(0)
    sizes = (shape.height, shape.width, 3)
    return [PatchedImage(shape, draw.integers(0, 256, sizes).astype(np.uint8)) for _ in range(_IMAGES)]


def main(arguments: list[str]) -> None:
    """Print the figures."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(arguments[0]) if arguments else write_demo_model(Path(folder) / "demo")
        encoder = VisionEncoder.load(model_dir, ModelConfig.from_directory(model_dir))
    images = images_of(encoder)
    together = cpu_s(lambda: encoder.encode(images))
    apart = cpu_s(lambda: [encoder.encode([image]) for image in images])
    patches = sum(image.shape.patches for image in images)
    print(f"{_IMAGES} images of {_SIDE} px, {patches} patches, one thread")
    print(
        f"one batch {together:.3f} s, one by one {apart:.3f} s: {apart / together:.2f} times as fast together"
    )
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        encoder.encode(images)
    rows = sorted(profiled.key_averages(), key=lambda row: -row.self_cpu_time_total)
    total = sum(row.self_cpu_time_total for row in rows)
    for row in rows[:8]:
        print(f"  {row.self_cpu_time_total / total:6.1%}  {row.key}")


if __name__ == "__main__":
    main(sys.argv[1:])
