"""Tenants as files and Redis tell of them: names, hashes of keys, limits, who shares cached blocks with whom."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$"

_HASHED: Final = "sha256:"


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """How much one tenant may ask for; 0 = as much as there is.

    Attributes:
        tokens_per_minute: Of prompts and answers. What an answer takes is known at its end, so a tenant may run into
            debt with the requests that are running, and waits until it is paid.
        concurrent: Requests at a time.
    """

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0

    @property
    def none(self) -> bool:
        """Whether nothing is limited."""
        return not (self.requests_per_minute or self.tokens_per_minute or self.concurrent)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks.

    Attributes:
        group: Tenants of one group may share cached blocks; empty = a group of its own.
        digests: SHA-256 of each key that is good now; several while keys are being changed.
    """

    name: str
    digests: tuple[bytes, ...] = ()
    group: str = ""
    limits: TenantLimits = TenantLimits()

    @property
    def cache_name(self) -> str:
        """Whose blocks it shares."""
        return f"group {self.group}" if self.group else self.name


Limit = Annotated[int, Field(ge=0, le=10**12)]


class TenantEntry(BaseModel):
    """One tenant as a file or Redis holds it. A limit that is absent is that of the settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    keys: Annotated[list[str], Field(min_length=1, max_length=64)]
    group: Annotated[str, Field(pattern=NAME)] | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrent: Limit | None = None

    def tenant(self, name: str, default: TenantLimits) -> Tenant:
        """The tenant of this entry.

        Raises:
            ValueError: A key that is no ``sha256:`` with 64 hex digits.
        """
        limits = TenantLimits(
            default.requests_per_minute if self.requests_per_minute is None else self.requests_per_minute,
            default.tokens_per_minute if self.tokens_per_minute is None else self.tokens_per_minute,
            default.concurrent if self.concurrent is None else self.concurrent,
        )
        return Tenant(name, tuple(hashed_key(key) for key in self.keys), self.group or "", limits)


class _Name(BaseModel):
    name: Annotated[str, Field(pattern=NAME)]


def digest_of(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).digest()


def hashed_key(text: str) -> bytes:
    """The digest written as ``sha256:HEX``.

    Raises:
        ValueError: It is none. The message does not repeat it: it may be a key.
    """
    digits = text.removeprefix(_HASHED)
    try:
        digest = bytes.fromhex(digits)
    except ValueError:
        digest = b""
    if not text.startswith(_HASHED) or len(digest) != 32:
        raise ValueError("a key must be written as sha256: and 64 hex digits")
    return digest


def tenants_of(entries: Mapping[str, Any], default: TenantLimits) -> dict[str, Tenant]:
    """Tenants by name.

    Raises:
        ValueError: What is wrong, and with which tenant; never a key.
    """
    tenants = {}
    for name, entry in entries.items():
        try:
            tenants[_Name(name=name).name] = TenantEntry.model_validate(entry).tenant(name, default)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(map(str, first["loc"])) or "entry"
            raise ValueError(f"tenant {name[:64]!r}: {where}: {first['msg']}") from None
        except ValueError as error:
            raise ValueError(f"tenant {name[:64]!r}: {error}") from None
    return tenants


def read_tenants(text: str, default: TenantLimits) -> dict[str, Tenant]:
    """Tenants of a TOML file: a table ``[tenants.NAME]`` each.

    Raises:
        ValueError: It is no such file, or names nobody: an empty file must not open the door.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"no TOML: {error}") from None
    entries = table.get("tenants")
    if not isinstance(entries, dict) or not entries or set(table) != {"tenants"}:
        raise ValueError("expected tables [tenants.NAME] and nothing else")
    return tenants_of(entries, default)
