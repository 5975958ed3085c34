"""Loads a role's TOML file into its settings. One file, one pydantic model, no other source.

The models are frozen and refuse unknown keys; this file adds that an error names the file and the key in one line.
"""

from __future__ import annotations

import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

Settings = TypeVar("Settings", bound=BaseModel)


class ConfigError(Exception):
    """A configuration file cannot be used; the message is one line."""


def load_config(path: Path, model: type[Settings], *, section: str | None = None) -> Settings:
    """Settings from a file.

    Args:
        path: A TOML file.
        model: What it must hold.
        section: Table of the file to take instead of all of it; an absent table counts as an empty one.

    Raises:
        ConfigError: The file cannot be read, is no TOML, or does not fit the model.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{path}: {reason}") from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    if section is not None:
        table = table.get(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} is no table")
    return parse_config(table, model, source=str(path) if section is None else f"{path} [{section}]")


def parse_config(table: Mapping[str, Any], model: type[Settings], *, source: str) -> Settings:
    """Settings from a table; ``source`` is named in errors.

    Raises:
        ConfigError: The table does not fit the model.
    """
    try:
        return model.model_validate(table)
    except ValidationError as error:
        # the value is shown so that the line can be found; long ones are cut
        found = [
            f"{'.'.join(map(str, item['loc'])) or 'file'}: {_said(item)}{_given(item)}"
            for item in error.errors()
        ]
        raise ConfigError(f"{source}: {'; '.join(found)}") from error


def config_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all keys of a model, in order of declaration."""
    for name, field in model.model_fields.items():
        nested = _nested(field.annotation)
        if nested is None:
            yield prefix + name
        else:
            yield from config_keys(nested, f"{prefix}{name}.")


def config_text(settings: BaseModel) -> str:
    """Settings as the TOML file that gives them back, defaults written out."""
    return "\n".join(_toml(settings.model_dump(), ())) + "\n"


# Pydantic's words where they are about Python instead of the file; type of error -> what is said.
_PLAIN_WORDS = {
    "extra_forbidden": "unknown key",
    "missing": "missing",
    "model_type": "must be a table",
    "dict_type": "must be a table",
}


def _said(item: Any) -> str:
    words: str = _PLAIN_WORDS.get(item["type"], item["msg"])
    return words


def _given(item: Any) -> str:
    if item["type"] in ("missing", "extra_forbidden"):
        return ""
    text = repr(item["input"])
    return f" (got {text if len(text) <= 60 else text[:57] + '...'})"


def _nested(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        models = [kind for kind in map(_nested, typing.get_args(annotation)) if kind is not None]
        return models[0] if len(models) == 1 else None
    return None


def _toml(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    plain = {name: value for name, value in table.items() if not isinstance(value, Mapping)}
    if path:
        yield f"[{'.'.join(path)}]"
    for name, value in plain.items():
        if value is not None:  # TOML has no null: absent says it
            yield f"{name} = {_value(value)}"
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield ""
            yield from _toml(value, (*path, name))


def _value(value: Any) -> str:
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        inner = (f"{name} = {_value(item)}" for name, item in value.items() if item is not None)
        return f"{{{', '.join(inner)}}}"
    if isinstance(value, list | tuple | set | frozenset):
        return f"[{', '.join(_value(item) for item in value)}]"
    # a basic string of TOML: JSON's escapes are a subset of its own
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in escaped) + '"'
