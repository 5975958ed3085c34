"""Whether a model directory can be served, as far as its headers say: before Ray and the workers cost half a minute.

Reads ``config.json``, ``tokenizer.json`` and the headers of the shards, and compares these with the config and with the
sizes of the files. No tensor is read and torch is not imported.
"""

from __future__ import annotations

import json
from pathlib import Path

from epdserve.services.cli.errors import CommandError


def check_model(model_dir: Path) -> None:
    """Return if nothing is wrong.

    Raises:
        CommandError: What is wrong, in one line: the first problem of a kind, and how many more there are.
    """
    # Imported here: commands that look at no model start without these
    from epdserve.model.checkpoint import Checkpoint
    from epdserve.model.compressed_tokens import TOKENIZER_FILE
    from epdserve.model.config import ModelConfig
    from epdserve.model.errors import ConfigError, ModelError, WeightMapError
    from epdserve.model.tensor_map import expected_tensors

    try:
        config = ModelConfig.from_directory(model_dir)
        _check_tokenizer(model_dir / TOKENIZER_FILE)
        Checkpoint.open(model_dir).check(expected_tensors(config))
    except (ConfigError, WeightMapError) as error:
        first, *others = error.problems
        more = f" (and {len(others)} more)" if others else ""
        kind = "config.json" if isinstance(error, ConfigError) else "weights"
        raise CommandError(f"the model in {model_dir} cannot be served: {kind}: {first}{more}") from error
    except ModelError as error:
        raise CommandError(f"the model in {model_dir} cannot be served: {error}") from error


def _check_tokenizer(path: Path) -> None:
    """Whether the file is whole. Building the real tokenizer takes seconds, and the router does that anyhow."""
    from epdserve.model.errors import TokenizerError

    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: {error}") from error
    if not isinstance(document, dict) or not {"model", "added_tokens"} <= document.keys():
        raise TokenizerError(f"{path}: no tokenizer, it lacks model or added_tokens")
