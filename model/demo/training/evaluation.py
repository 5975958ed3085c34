"""How often the served model gives the whole right answer, exactly and under each approximation, in one process.

An answer counts if every token of it is the most probable one after the right tokens before it, which is what greedy
decoding gives. Rows run through ``Backbone`` over real pages, as in a worker.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from epdserve.model.backbone import Backbone
from epdserve.model.demo.training.cases import Case, Cases
from epdserve.model.demo.training.vocabulary import Vocabulary
from epdserve.model.logits import LogitsPlan, LogitsRun
from epdserve.model.precision import Precision

_BLOCK: Final = 32  # tokens of a block: hits end on its boundaries
_Z: Final = 1.96  # of a 95 % interval


@dataclass(frozen=True, slots=True)
class Way:
    """How a prompt is computed: the name of the row, number formats, and which replays stand in for rows."""

    name: str
    precision: Precision = Precision.F32Q
    encoder_hit: bool = False
    decoder_replay: bool = False


WAYS: Final = (
    Way("exact, caches rounded"),
    Way("caches not rounded", Precision.F32),
    Way("native: bfloat16, FP8 products", Precision.NATIVE),
    Way("decoder replay", decoder_replay=True),
    Way("encoder replay, hit at random", encoder_hit=True),
    Way("both replays", encoder_hit=True, decoder_replay=True),
)


def is_right(backbone: Backbone, case: Case, way: Way, number: int) -> bool:
    """Whether greedy decoding gives the answer."""
    ids = np.array([*case.prompt, *case.answer[:-1]], dtype=np.int64)
    hit = 0
    if way.encoder_hit:
        blocks = (len(case.prompt) - 1) // _BLOCK
        hit = _BLOCK * (2 + number % (blocks - 1)) if blocks > 2 else 0
        hit = min(hit, _BLOCK * blocks)
    plan = LogitsPlan(prefill=len(case.prompt), encoder_hit=hit, decoder_replay=way.decoder_replay)
    logits = LogitsRun(backbone, ids, plan, block_tokens=_BLOCK).run()
    said = logits[len(case.prompt) - 1 :].argmax(-1)
    return said.tolist() == list(case.answer)


def interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share = right / count
    centre = share + _Z**2 / (2 * count)
    spread = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    whole = 1 + _Z**2 / count
    return max(0.0, (centre - spread) / whole), min(1.0, (centre + spread) / whole)


def table(
    model_dir: Path, names: Sequence[str], ways: Sequence[Way], count: int
) -> Iterator[tuple[Way, str, int]]:
    """(way, name, right answers of ``count``), as they come."""
    cases = Cases(Vocabulary())
    backbones: dict[Precision, Backbone] = {}
    for way in ways:
        if way.precision not in backbones:
            backbones[way.precision] = Backbone.load(model_dir, precision=way.precision)
        for name in names:
            right = sum(
                is_right(backbones[way.precision], cases.draw(name, number), way, number)
                for number in range(count)
            )
            yield way, name, right


def main() -> None:
    """Print a Markdown row for every way and name."""
    parser = argparse.ArgumentParser(
        prog="python -m epdserve.model.demo.training.evaluation", description=__doc__
    )
    parser.add_argument("model", type=Path, help="directory of a demo model")
    parser.add_argument(
        "--cases", nargs="+", default=["copy", "recall", "recall-512", "tool", "json", "greet"]
    )
    parser.add_argument("--ways", type=int, default=len(WAYS), help="only the first so many of the ways")
    parser.add_argument("--count", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| way | case | right | 95 % interval |\n|---|---|---|---|")
    for way, name, right in table(options.model, options.cases, WAYS[: options.ways], options.count):
        low, high = interval(right, options.count)
        print(
            f"| {way.name} | {name} | {right / options.count:.2f} of {options.count} | {low:.2f}-{high:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
