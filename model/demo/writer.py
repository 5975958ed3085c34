"""Writes the demo model, random or trained: a small checkpoint in the published format, the same bytes on every run."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from epdserve.model.checkpoint import SINGLE_FILE
from epdserve.model.compressed_tokens import TOKENIZER_FILE, load_or_derive_token_map
from epdserve.model.config import CONFIG_FILE, ModelConfig
from epdserve.model.demo.preset import DEMO_KEY, config_document, trained_document
from epdserve.model.demo.shipped import TRAINED_FILE, check_shipped
from epdserve.model.demo.tokenizer import (
    BOS,
    EOS,
    IMAGE,
    MARKERS,
    PAD,
    THINK_END,
    tokenizer_settings,
    train_tokenizer,
)
from epdserve.model.demo.weights import demo_tensors, image_tensors
from epdserve.model.engram_plan import EngramPlan
from epdserve.model.errors import DemoModelError
from epdserve.model.fingerprint import SIDECAR_FILE
from epdserve.model.tokenizer import Tokenizer
from safetensors.torch import load_file, save_file

SEED: Final = 20260
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
_FILES: Final = frozenset({CONFIG_FILE, SINGLE_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE})


def write_demo_model(directory: str | Path, *, seed: int = SEED) -> Path:
    """Write the demo model with random weights into ``directory``: wholly, or not at all.

    An existing demo model there is replaced; anything else is left alone.

    Args:
        directory: Absent, empty, or a demo model.
        seed: Of the weights. Equal seeds give equal bytes.

    Returns:
        The resolved directory.

    Raises:
        DemoModelError: If the directory holds something else, or cannot be written.
    """
    return _write_whole(directory, lambda fresh: _write_random(fresh, seed))


def write_trained_model(directory: str | Path) -> Path:
    """Write the demo model with the trained weights that come with the package; otherwise as ``write_demo_model``.

    Raises:
        DemoModelError: Also if the weights are absent or belong to another tokenizer or config.
    """
    return _write_whole(directory, _write_trained)


def _write_whole(directory: str | Path, write_files: Callable[[Path], None]) -> Path:
    target = Path(directory).resolve()
    _refuse_foreign(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as work:
            fresh = Path(work) / "new"
            fresh.mkdir()
            write_files(fresh)
            if target.exists():
                target.rename(Path(work) / "old")
            fresh.rename(target)
    except OSError as error:
        raise DemoModelError(f"cannot write a demo model to {target}: {error}") from error
    return target


def is_demo_model(directory: Path) -> bool:
    """Whether the directory holds a demo model and nothing else."""
    try:
        document = json.loads((directory / CONFIG_FILE).read_bytes())
        present = {entry.name for entry in directory.iterdir() if not entry.name.startswith(SIDECAR_FILE)}
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and DEMO_KEY in document and present <= _FILES


def _refuse_foreign(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise DemoModelError(f"{target} is not a directory")
    if any(target.iterdir()) and not is_demo_model(target):
        raise DemoModelError(f"{target} holds files that are not a demo model; name another directory")


def _write_random(directory: Path, seed: int) -> None:
    config, tokenizer = _write_frame(directory, config_document(seed), train_tokenizer().to_str(pretty=True))
    endings = [config.eos_token_id, tokenizer.marker_id(THINK_END)]
    tensors = demo_tensors(config, seed=seed, silent_ids=_silent_ids(tokenizer), ending_ids=endings)
    save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})


def _write_trained(directory: Path) -> None:
    definition = train_tokenizer().to_str(pretty=True)
    check_shipped(definition)
    config, _ = _write_frame(directory, trained_document(), definition)
    tensors = {**image_tensors(config, seed=SEED), **load_file(TRAINED_FILE)}
    save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})


def _write_frame(directory: Path, document: dict[str, Any], definition: str) -> tuple[ModelConfig, Tokenizer]:
    """Everything but the weights."""
    config = ModelConfig.from_json(document)
    (directory / TOKENIZER_FILE).write_text(definition, encoding="utf-8")
    _write_json(directory / TOKENIZER_CONFIG_FILE, tokenizer_settings(config.text.max_position_embeddings))
    _write_json(directory / CONFIG_FILE, document)
    tokenizer = Tokenizer(definition)
    _check_agreement(config, tokenizer, directory)
    return config, tokenizer


def _check_agreement(config: ModelConfig, tokenizer: Tokenizer, directory: Path) -> None:
    """The preset states numbers that follow from the tokenizer; a preset edited by halves stops here."""
    markers = {
        BOS: config.bos_token_id,
        EOS: config.eos_token_id,
        PAD: config.pad_token_id,
        IMAGE: config.image_token_id,
    }
    for marker, stated in markers.items():
        if (actual := tokenizer.marker_id(marker)) != stated:
            raise DemoModelError(f"preset: {marker} has id {actual}, config says {stated}")
    EngramPlan.of(config)
    load_or_derive_token_map(directory, config)


def _silent_ids(tokenizer: Tokenizer) -> list[int]:
    """Markers but for the endings, control characters, and byte pieces that are no text alone."""
    endings = {EOS, THINK_END}
    silent = {tokenizer.marker_id(marker) for marker in MARKERS if marker not in endings}
    for token in range(tokenizer.vocab_size):
        text = tokenizer.decode([token])
        if "\ufffd" in text or not text.replace("\n", "").isprintable():
            silent.add(token)
    return sorted(silent)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
