"""``python -m epdserve.model.demo.training.export STATE FILE``: a state of training as a checkpoint file.

The file holds the tensors in the published storage formats. Its metadata name the tokenizer and the config they were
trained with: ``write_trained_model`` refuses to put them beside others.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from epdserve.model.demo.shipped import identity_of
from epdserve.model.demo.training.rounding import stored_tensors
from epdserve.model.demo.training.trainer import Trainer
from safetensors.torch import save_file


def export(state_dir: Path, target: Path) -> None:
    """Write the weights of a training state.

    Raises:
        FileNotFoundError: There is no state in ``state_dir``.
    """
    if not (state_dir / "progress.json").exists():
        raise FileNotFoundError(f"no state of training in {state_dir}")
    trainer = Trainer(state_dir, 0)
    tensors = stored_tensors(trainer.config, trainer.weights)
    identity = identity_of(trainer.vocabulary.definition)
    save_file(tensors, target, metadata={"format": "pt", **identity})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m epdserve.model.demo.training.export", description=__doc__
    )
    parser.add_argument("state", type=Path, help="directory that the trainer wrote")
    parser.add_argument("target", type=Path, help="checkpoint file to write")
    options = parser.parse_args()
    export(options.state, options.target)
    print(f"wrote {options.target} ({options.target.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
