"""How often the served model gives the whole right answer, exactly and under each approximation, in one process.

An answer counts if every token of it is the most probable one after the right tokens before it, which is what greedy
decoding gives.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import torch
from epdserve.model.demo.training.approximations import WAYS, Models, Way, is_right
from epdserve.model.demo.training.cases import Cases
from epdserve.model.demo.training.vocabulary import Vocabulary

_Z: Final = 1.96  # of a 95 % interval
CASES: Final = ("copy", "copy-200", "recall-512", "recall-1000", "words", "passage", "tool", "json")


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
    cases, models = Cases(Vocabulary()), Models(model_dir)
    for way in ways:
        backbone = models.of(way)
        for name in names:
            answers = (
                is_right(backbone, cases.draw(name, number), way, f"{name} {number}")
                for number in range(count)
            )
            yield way, name, sum(answers)


def main() -> None:
    """Print a Markdown row for every way and name."""
    parser = argparse.ArgumentParser(
        prog="python -m epdserve.model.demo.training.evaluation", description=__doc__
    )
    parser.add_argument("model", type=Path, help="directory of a demo model")
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--ways", nargs="+", type=int, default=list(range(len(WAYS))), help="numbers of ways")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--json", type=Path, help="file to append the figures to, a line each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| way | case | right | 95 % interval |\n|---|---|---|---|")
    ways = [WAYS[number] for number in options.ways]
    for way, name, right in table(options.model, options.cases, ways, options.count):
        low, high = interval(right, options.count)
        print(
            f"| {way.name} | {name} | {right / options.count:.2f} of {options.count} | {low:.2f}-{high:.2f} |",
            flush=True,
        )
        if options.json is not None:
            with options.json.open("a") as file:
                row = {"way": way.name, "case": name, "right": right, "count": options.count}
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
