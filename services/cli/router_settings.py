"""The router's part of the file that ``up`` reads. It imports no worker's settings: a router's image has no torch."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from epdserve.services.cli.errors import CommandError
from epdserve.services.config import ConfigError, parse_config
from epdserve.services.router.config import RouterConfig

# What the router must see as the pool does: its key and the pool's.
AS_THE_POOL: Final = {
    "registry_namespace": "namespace",
    "registry_lease_s": "lease_s",
    "registry_refresh_s": "refresh_s",
}
SECTIONS: Final = frozenset({"machine", "router", "pool", "prefill", "decode", "encode", "store"})
_IN_TENANCY: Final = ("tenants_file", "tls_cert_file", "tls_key_file", "tls_client_ca_file")


class Told(Protocol):
    """What every process of an installation is told alike."""

    @property
    def config(self) -> Path | None: ...  # noqa: D102
    @property
    def model(self) -> Path: ...  # noqa: D102
    @property
    def registry(self) -> str: ...  # noqa: D102
    @property
    def token_file(self) -> Path: ...  # noqa: D102
    @property
    def source(self) -> str: ...  # noqa: D102


def router_config(told: Told, over: Mapping[str, Any]) -> tuple[RouterConfig, str]:
    """The router's settings, and the level of its log.

    Args:
        over: Keys of ``[router]`` or ``[router.tenancy]`` that the command line says; None = it does not.

    Raises:
        CommandError: The file or a value does not fit.
    """
    table = read_table(told.config)
    if unknown := sorted(set(table) - SECTIONS):
        raise CommandError(f"{told.source}: unknown key {unknown[0]}")
    router, pool = dict(table.get("router", {})), table.get("pool", {})
    if filled := {"model_dir", "registry_url", "cluster_token_file", *AS_THE_POOL} & set(router):
        raise CommandError(f"{told.source} [router]: {min(filled)} is set elsewhere")
    router |= {"model_dir": told.model, "registry_url": told.registry, "cluster_token_file": told.token_file}
    router |= {key: pool[name] for key, name in AS_THE_POOL.items() if name in pool}
    tenancy = dict(router.get("tenancy", {}))
    for name, value in over.items():
        if value is not None:
            (tenancy if name in _IN_TENANCY else router)[name] = value
    router["tenancy"] = tenancy
    level = str(table.get("machine", {}).get("log_level", "INFO"))
    try:
        return parse_config(router, RouterConfig, source=f"{told.source} [router]"), level
    except ConfigError as error:
        raise CommandError(str(error)) from error


def read_table(path: Path | None) -> dict[str, Any]:
    """The file's table; an empty one without a file.

    Raises:
        CommandError: It cannot be read, or is no TOML.
    """
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CommandError(f"{path} is no TOML file: {error}") from error
