"""The trained weights that come with the package, and what they belong to."""

import hashlib
import json
from pathlib import Path
from typing import Final

from epdserve.model.demo.preset import CONFIG
from epdserve.model.errors import DemoModelError
from safetensors import safe_open

TRAINED_FILE: Final = Path(__file__).with_name("trained.safetensors")


def identity_of(tokenizer_definition: str) -> dict[str, str]:
    """Digests of the tokenizer and the text config that weights were trained with, as metadata of their file."""
    config = json.dumps(CONFIG["text_config"], sort_keys=True)
    return {
        "tokenizer_sha256": hashlib.sha256(tokenizer_definition.encode()).hexdigest(),
        "config_sha256": hashlib.sha256(config.encode()).hexdigest(),
    }


def check_shipped(tokenizer_definition: str, file: Path = TRAINED_FILE) -> None:
    """Weights beside another tokenizer or config would answer nonsense; they are refused.

    Raises:
        DemoModelError: The file is absent, or belongs to another tokenizer or config.
    """
    if not file.exists():
        raise DemoModelError(f"this installation has no trained weights: {file} is absent")
    with safe_open(file, "pt") as stored:
        metadata = stored.metadata() or {}
    for name, digest in identity_of(tokenizer_definition).items():
        if metadata.get(name) != digest:
            raise DemoModelError(
                f"{file.name} was trained with another {name.removesuffix('_sha256')}; train anew"
            )
