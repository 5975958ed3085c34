"""One file for one machine: the settings of every role, and what ``up`` itself needs.

What the roles must agree on is said once and filled in everywhere: the model directory, the registry and the file of
the cluster token are chosen by ``up`` and are no keys of the file; the router takes over what ``[pool]`` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from epdserve.services.cli.errors import CommandError
from epdserve.services.cli.router_settings import AS_THE_POOL, read_table
from epdserve.services.config import ConfigError, parse_config
from epdserve.services.decode.config import DecodeSettings
from epdserve.services.encode.config import EncodeSettings
from epdserve.services.pool.config import PoolConfig
from epdserve.services.prefill.config import PrefillSettings
from epdserve.services.router.config import RouterConfig
from epdserve.services.store.config import StoreSettings
from pydantic import BaseModel, ConfigDict, Field

__all__ = ["AS_THE_POOL", "Chosen", "MachineConfig", "UpSettings", "fill_in", "machine_config", "read_table"]

Model = TypeVar("Model", bound=BaseModel)

# Keys that ``up`` fills in; section -> names.
FILLED_IN = {
    "router": ("model_dir", "registry_url", "cluster_token_file"),
    "pool": ("redis_url", "cluster_token_file"),
    "prefill.engine": ("model_dir",),
    "decode.engine": ("model_dir",),
    "store": ("model_dir",),
    "encode": ("model_dir",),
}


# What workers and their store must have alike: KV blocks are handed over as the bytes they are.
ALIKE = ("block_tokens", "precision", "model_dir")


class MachineConfig(BaseModel):
    """What ``up`` starts.

    Attributes:
        model_dir: Checkpoint; ``--model`` wins. The demo model is written to ``.demo-model`` if neither is given.
        encode_workers: Without any, prefill workers embed images themselves.
        store: Whether this machine has one.
        ssd_bytes: Of the SSD tier below the state folder, where ``[store.ssd]`` names no directories; 0 is none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model_dir: Path | None = None
    prefill_workers: int = Field(1, ge=1, le=64)
    decode_workers: int = Field(1, ge=1, le=64)
    encode_workers: int = Field(0, ge=0, le=64)
    store: bool = True
    ssd_bytes: int = Field(256 * 2**20, ge=0)
    log_level: str = Field("INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")


class UpSettings(BaseModel):
    """The whole file, filled in."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    machine: MachineConfig
    router: RouterConfig
    pool: PoolConfig
    prefill: PrefillSettings
    decode: DecodeSettings
    store: StoreSettings
    encode: EncodeSettings


@dataclass(frozen=True, slots=True)
class Chosen:
    """What ``up`` chose for this run."""

    model_dir: Path
    registry_url: str
    token_file: Path


def machine_config(table: Mapping[str, Any], *, source: str) -> MachineConfig:
    """The ``[machine]`` section alone, for what must be known before the rest can be filled in.

    Raises:
        CommandError: It does not fit.
    """
    section = table.get("machine", {})
    return _parse(section, MachineConfig, f"{source} [machine]")


def fill_in(table: Mapping[str, Any], chosen: Chosen, *, port: int | None, source: str) -> UpSettings:
    """The settings of every role.

    Args:
        table: Of the file.
        port: Of the router, if the command line says one.
        source: Named in errors.

    Raises:
        CommandError: A key is unknown, has a bad value, is one that ``up`` fills in, or differs between prefill and
            decode workers although it must not.
    """
    values = {
        "model_dir": str(chosen.model_dir),
        "registry_url": chosen.registry_url,
        "redis_url": chosen.registry_url,
        "cluster_token_file": str(chosen.token_file),
    }
    filled: dict[str, Any] = {"machine": dict(table.get("machine", {}))}
    for name in table:
        filled.setdefault(name, table[name])  # unknown sections are refused by name below
    for path, names in FILLED_IN.items():
        section = _section(filled, path, source)
        for name in names:
            if name in section:
                raise CommandError(
                    f"{source} [{path}]: {name} is set by up itself; see machine.model_dir and --model"
                )
            section[name] = values[name]
    _carry_over(filled, source)
    images = _section(filled, "prefill.images", source)
    images.setdefault("mode", "pool" if filled["machine"].get("encode_workers") else "local")
    if port is not None:
        _section(filled, "router", source)["port"] = port
    settings = _parse(filled, UpSettings, source)
    _check_alike(settings, source)
    return settings


def _carry_over(filled: dict[str, Any], source: str) -> None:
    """What is said once and concerns others, too."""
    router, pool = _section(filled, "router", source), _section(filled, "pool", source)
    for key, pool_key in AS_THE_POOL.items():
        if pool_key in pool:
            router[key] = pool[pool_key]
    store, engine = _section(filled, "store", source), _section(filled, "prefill.engine", source)
    for key in ALIKE:
        if key in engine:
            store.setdefault(key, engine[key])


def _check_alike(settings: UpSettings, source: str) -> None:
    prefill = settings.prefill.engine.model_dump(mode="json")
    for section, role in (("decode.engine", settings.decode.engine), ("store", settings.store)):
        other = role.model_dump(mode="json")
        for name in ALIKE:
            if prefill[name] != other[name]:
                raise CommandError(
                    f"{source}: {name} is {prefill[name]!r} in [prefill.engine] and {other[name]!r} in [{section}]; "
                    "blocks are handed over as they are, so it must be the same"
                )


def _section(table: dict[str, Any], path: str, source: str) -> dict[str, Any]:
    """The table at a dotted path, copied on the way so that the caller's stays as it is."""
    for name in path.split("."):
        inner = table.get(name, {})
        if not isinstance(inner, Mapping):
            raise CommandError(f"{source}: {path} is no table")
        table[name] = dict(inner)
        table = table[name]
    return table


def _parse(table: Any, model: type[Model], source: str) -> Model:
    try:
        return parse_config(table, model, source=source)
    except ConfigError as error:
        raise CommandError(str(error)) from error
