"""Settings of tenants and protection."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from epdserve.services.router.tenancy.body_limits import BodyLimits
from epdserve.services.router.tenancy.tenant import TenantLimits
from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=0)]


class TenancySettings(BaseModel):
    """Who may come in, and how much of what.

    Attributes:
        tenants_file: TOML, a table ``[tenants.NAME]`` each; keys in it are hashed.
        tenants_in_redis: Tenants are also read from the registry's Redis.
        refresh_s: Keys and limits that were changed are good after this.
        requests_per_minute, tokens_per_minute, concurrent: Of a tenant that has no limit of its own; 0 = none.
        shared_limits: Limits count over all routers, in the registry's Redis; else each router counts for itself.
        open_without_keys: Listen beyond loopback although nobody needs a key.
        admin_port: Administration and the console on loopback; absent = none.
        admin_key_file: Holds the key that changes on that port need; absent = they need none.
        max_messages, max_parts, max_tools, max_stops, max_depth: Of one body; 0 = none.
        tls_cert_file, tls_key_file: Serve HTTPS; both or neither.
        tls_client_ca_file: Take clients with a certificate of this authority only.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tenants_file: Path | None = None
    tenants_in_redis: bool = False
    refresh_s: float = Field(default=2.0, gt=0)
    requests_per_minute: Count = 0
    tokens_per_minute: Count = 0
    concurrent: Count = 0
    shared_limits: bool = True
    open_without_keys: bool = False
    admin_port: int | None = Field(default=None, ge=0, le=65535)
    admin_key_file: Path | None = None
    max_messages: Count = 10_000
    max_parts: Count = 1_000
    max_tools: Count = 1_024
    max_stops: Count = 16
    max_depth: Count = 200
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    tls_client_ca_file: Path | None = None

    @model_validator(mode="after")
    def _tls_is_whole(self) -> TenancySettings:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file go together")
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise ValueError("tls_client_ca_file needs tls_cert_file")
        return self

    @property
    def default_limits(self) -> TenantLimits:
        """Of a tenant that has none of its own."""
        return TenantLimits(self.requests_per_minute, self.tokens_per_minute, self.concurrent)

    @property
    def body_limits(self) -> BodyLimits:
        """What one body may hold."""
        return BodyLimits(self.max_messages, self.max_parts, self.max_tools, self.max_stops, self.max_depth)
