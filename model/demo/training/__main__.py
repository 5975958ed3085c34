"""``python -m epdserve.model.demo.training DIRECTORY``: train the demo model, or go on with it."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import signal
import threading
import time
from pathlib import Path
from typing import Final

import torch
from epdserve.model.demo.training.schedule import SCHEDULE, Stage
from epdserve.model.demo.training.scores import Scores
from epdserve.model.demo.training.trainer import Trainer

_REPORT_STEPS: Final = 10
_SAVE_STEPS: Final = 50
_MALLOC: Final = {-1: 2**30, -2: 2**26, -3: 2**30}  # M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD in bytes


def main() -> None:
    """Run the stages that are left."""
    parser = argparse.ArgumentParser(prog="python -m epdserve.model.demo.training", description=__doc__)
    parser.add_argument("directory", type=Path, help="state of the run; one that is there is taken up")
    parser.add_argument("--seed", type=int, default=41, help="of first weights and data")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    _keep_memory()
    trainer = Trainer(options.directory, options.seed)
    names = [stage.name for stage in SCHEDULE]
    done = names.index(trainer.stage_name) if trainer.stage_name in names else 0
    asked_to_stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked_to_stop.set())
    for stage in SCHEDULE[done:]:
        run_stage(trainer, stage, asked_to_stop)


def _keep_memory() -> None:
    """Let glibc reuse what a step frees instead of giving it back: a step then touches few new pages."""
    with contextlib.suppress(OSError, AttributeError):  # another C library: slower, nothing else
        library = ctypes.CDLL(None)
        for setting, value in _MALLOC.items():
            library.mallopt(setting, value)


def run_stage(trainer: Trainer, stage: Stage, asked_to_stop: threading.Event) -> None:
    """Train to the end of a stage or until asked to stop, with a line of progress now and then; then save."""
    if asked_to_stop.is_set():
        return
    trainer.begin(stage)
    scores, began, from_tokens = Scores(), time.monotonic(), trainer.tokens
    while trainer.tokens < stage.tokens and not asked_to_stop.is_set():
        trainer.run_step(stage, scores)
        if trainer.step % _REPORT_STEPS == 0:
            rate = (trainer.tokens - from_tokens) / (time.monotonic() - began)
            left = (stage.tokens - trainer.tokens) / rate / 60
            print(
                f"{stage.name} {trainer.step} {trainer.tokens / 1e6:.3f}M {rate:.0f} tok/s {left:.0f} min left | "
                f"{scores.line()}",
                flush=True,
            )
            if scores.reach(stage.gate):
                trainer.tokens = stage.tokens  # so that a run taken up later does not come back to it
            scores.clear()
        if trainer.step % _SAVE_STEPS == 0:
            trainer.save()
    trainer.save()


if __name__ == "__main__":
    main()
