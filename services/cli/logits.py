"""``epdserve logits``: logits of given token ids, through the batch, pages and replay code that serves."""

import json
from pathlib import Path

from epdserve.services.cli.errors import CommandError


def read_ids(path: Path) -> list[int]:
    """The token ids of a JSON file that holds one list of integers.

    Raises:
        CommandError: The file cannot be read or holds something else.
    """
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot read token ids from {path}: {error}") from error
    if not isinstance(ids, list) or not ids or any(type(item) is not int or item < 0 for item in ids):
        raise CommandError(f"{path} must hold one non-empty JSON list of non-negative integers")
    return ids
