"""Kinds of sequences (``sequences.py``) and their shares, as stages mix them."""

from __future__ import annotations

from typing import Final

ALL: Final = {
    "stream": 0.05,
    "copy": 0.1,
    "recall": 0.15,
    "search": 0.15,
    "talk": 0.3,
    "json": 0.15,
    "tools": 0.4,
}
LONG: Final = {"search": 0.4, "recall": 0.1, "copy": 0.05, "talk": 0.2, "json": 0.07, "tools": 0.25}

DRILLS: Final = {
    "calls": 0.3,
    "forms": 0.2,
    "distant": 0.1,
    "words": 0.12,
    "passages": 0.08,
    "direct": 0.05,
    "copy": 0.07,
    "recall": 0.05,
    "talk": 0.03,
}

EVERYTHING: Final = {
    "brief": 0.25,
    "tools": 0.15,
    "json": 0.15,
    "calls": 0.08,
    "forms": 0.08,
    "words": 0.1,
    "passages": 0.08,
    "talk": 0.15,
    "search": 0.1,
    "recall": 0.04,
    "copy": 0.1,
    "direct": 0.04,
    "distant": 0.03,
}
ANSWERS: Final = {
    **EVERYTHING,
    "json": 0.22,
    "words": 0.14,
    "thinking": 0.2,
    "distant": 0.0,
    "calls": 0.04,
    "forms": 0.25,
}
FAR: Final = {
    "search": 0.3,
    "tools": 0.3,
    "json": 0.15,
    "talk": 0.1,
    "thinking": 0.12,
    "words": 0.06,
    "passages": 0.06,
    "copy": 0.08,
    "recall": 0.05,
    "calls": 0.03,
    "forms": 0.1,
}
POLISH: Final = {
    "search": 0.25,
    "tools": 0.25,
    "brief": 0.05,
    "json": 0.15,
    "forms": 0.15,
    "thinking": 0.12,
    "talk": 0.1,
    "words": 0.08,
    "passages": 0.08,
    "copy": 0.1,
    "recall": 0.04,
    "direct": 0.03,
    "calls": 0.02,
}
FINISH: Final = {
    **POLISH,
    "search": 0.2,
    "forms": 0.2,
    "json": 0.2,
    "tools": 0.17,
    "brief": 0.15,
    "passages": 0.16,
    "copy": 0.12,
}
# What was weak after FINISH: the next field of an object, answers after long thoughts and after results, far facts
WEAK: Final = {
    "chains": 0.22,
    "forms": 0.1,
    "json": 0.15,
    "ponder": 0.2,
    "thinking": 0.05,
    "search": 0.12,
    "recall": 0.06,
    "brief": 0.16,
    "tools": 0.06,
    "talk": 0.08,
    "words": 0.05,
    "passages": 0.08,
    "copy": 0.08,
    "direct": 0.03,
    "calls": 0.03,
}
REACH: Final = {
    **WEAK,
    "chains": 0.07,
    "forms": 0.07,
    "search": 0.3,
    "tools": 0.15,
    "brief": 0.1,
    "words": 0.1,
    "passages": 0.12,
    "copy": 0.1,
}
