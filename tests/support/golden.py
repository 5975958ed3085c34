"""Golden vectors of the tiny model (tests/golden/README.md says where they come from)."""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from epdserve.model.backbone import Backbone
from epdserve.model.batch import ForwardBatch, Outputs, Segment
from epdserve.model.entry_codec import entry_codec
from epdserve.model.logits import LogitsPlan, LogitsRun
from epdserve.model.precision import Precision
from safetensors.torch import load_file

GOLDEN = Path(__file__).parent.parent / "golden"
TINY = GOLDEN / "tiny"


@cache
def golden(setting: str) -> dict[str, torch.Tensor]:
    """Arrays of one setting."""
    return load_file(TINY / f"{setting}.safetensors")


@cache
def tiny(setting: str) -> Backbone:
    """The tiny model; do not wrap this one, see ``fresh_tiny``."""
    return fresh_tiny(setting)


def fresh_tiny(setting: str) -> Backbone:
    """A tiny model of one's own."""
    return Backbone.load(TINY, precision=Precision(setting))


def ids_of(arrays: dict[str, torch.Tensor], name: str) -> np.ndarray:
    """Token ids as int64."""
    return arrays[name].numpy().astype(np.int64)


def main_cache(run: LogitsRun, layer: int, count: int) -> torch.Tensor:
    """(count, D) main KV of a source layer, read back from pages."""
    plane = run.pools.planes[layer]
    entry = torch.arange(count)
    page, within = entry // plane.entries_per_page, entry % plane.entries_per_page
    return entry_codec(run.layout.entry_format).decode_main(*plane.read_main(page, within))


def index_cache(run: LogitsRun, layer: int, count: int) -> torch.Tensor:
    """(count, I) indexer keys of a source layer, read back from pages."""
    codec, every_page = entry_codec(run.layout.entry_format), torch.arange(run.pools.num_pages)
    return codec.decode_index(*run.pools.planes[layer].read_index(every_page)).flatten(0, 1)[:count]


def window_cache(run: LogitsRun, layer: int, positions: torch.Tensor) -> torch.Tensor:
    """(rows, D) window rows of slot 0 at these positions."""
    window = run.backbone.config.text.sliding_window
    rows = run.pools.windows[layer][0, positions.long() % window]
    return entry_codec(run.layout.entry_format).decode_window(rows)


def one_prefill(
    backbone: Backbone, ids: np.ndarray, block_tokens: int = 128
) -> tuple[LogitsRun, torch.Tensor]:
    """One prefill of all ids without any replay; the run and its logits."""
    run = LogitsRun(backbone, ids, LogitsPlan(), block_tokens=block_tokens)
    return run, run.run()


def batch_of(run: LogitsRun, start: int, count: int, slot: int = 0) -> ForwardBatch:
    """A batch of one segment over a run's pages."""
    segment = Segment(run.ids, start, count, run.pages, slot, outputs=Outputs.ALL)
    return ForwardBatch.build([segment], run.backbone.batch_shape(run.layout))
