"""Takes secrets out of text before it leaves the machine.

Three nets, one behind the other: the very values that files of secrets hold; what stands behind a name that says
secret, in any of the notations that occur here; and what looks like a key wherever it stands. What is taken out is
replaced by a word, so that a reader sees that something was there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

REMOVED: Final = "[removed]"
_SHORTEST: Final = 8  # a shorter value would take innocent words out, and is no secret

# name = "value", name: value, "name": "value", NAME=value, --name value; names end in what is secret
_NAMED: Final = re.compile(
    r"""(?ix)
    (\b[\w.-]*(?:api[_-]?key|secret|password|passwd|authorization|cookie|(?:cluster|access|bearer|auth)[_-]?token|token)
    ["']?\s*(?:[:=]|\s)\s*)
    (?!\s*(?:_|\d+(?:\.\d+)?\s*(?:[,}\]#\n]|$)|true\b|false\b|null\b|none\b))
    (?:(?:bearer|basic)\s+)?
    ("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s,;}\]]+)
    """
)
_SHAPED: Final = (
    re.compile(r"\b(?:bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE),
    re.compile(r"\b(?:sk|pk|rk|hf|ghp|gho|xox[abp])[-_][A-Za-z0-9_-]{8,}"),
    re.compile(r"\bsha256:[0-9a-fA-F]{32,}"),
    re.compile(r"\b[0-9a-fA-F]{64}\b"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL),
    re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"),
)


class Redactor:
    """Takes secrets out of text.

    Args:
        secrets: Values that must not be in it, whatever stands around them.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = {secret for secret in secrets if len(secret) >= _SHORTEST}
        # the longest first: one may be part of another
        ordered = sorted(known, key=lambda secret: (-len(secret), secret))
        self._known = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def clean(self, text: str) -> str:
        """The text without them."""
        if self._known is not None:
            text = self._known.sub(REMOVED, text)
        text = _NAMED.sub(lambda match: match[1] + REMOVED, text)
        for shape in _SHAPED:
            text = shape.sub(REMOVED, text)
        return text


def secrets_in(path: Path) -> list[str]:
    """Values of a file of secrets: words, what stands in quotes, and what follows `=`; none if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    words = [word for line in text.splitlines() for word in line.split()]
    quoted = re.findall(r'"([^"\n]+)"', text)
    plain = [word.partition("=")[2] or word for word in words]
    return [value.strip("\"',[]") for value in (*words, *quoted, *plain)]
