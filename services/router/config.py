"""Settings of the router."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from epdserve.services.router.images.config import ImageSettings
from epdserve.services.router.slo import SloSettings
from epdserve.services.router.tenancy.config import TenancySettings
from pydantic import BaseModel, ConfigDict, Field


class RouterConfig(BaseModel):
    """What one router process is told. Defaults start the one-machine setup on loopback.

    Attributes:
        model_dir: Where ``tokenizer.json`` lies.
        model_name: The name clients ask for; ``model_aliases`` are other names for it.
        router_id: Unique among the routers of a cluster.
        registry_lease_s: As the workers' pool has it.
        cluster_token_file: The token of internal calls; needed to reach workers.
        max_bodies_bytes: Bodies of all requests together.
        max_completion_tokens: Cap on what a request without a limit of its own may produce; 0 = the context.
        strict_official: Refuse what DeepSeek's own service refuses: n > 1, forced calls while thinking.
        stop_in_reasoning: Stop strings are matched in the reasoning, too.
        unwrap_arguments: Take a call's arguments out of a property "arguments" or "input" that no schema has.
        tokens_per_event: Tokens that may share an event of a stream; 0 = all that are ready together.
        keep_alive_s: A silent stream gets a comment this often.
        keep_alive_whole: A whole answer gets a blank line before it as often; its status is 200 from then on.
        send_stall_s: A client that takes no bytes for so long is gone.
        decode_stall_s: A decode worker that sends nothing for so long is lost.
        replacement_wait_s: How long a request whose worker died waits for another one to appear.
        max_resumes: How often a stream may go on elsewhere after its decode worker died.
        isolation: Whose prompts may share cached blocks: everybody's, a key's, or a user's of a key.
        memo_bytes: Drawn ids of delivered messages that are remembered, so that the next turn hits them.
        placement: By expected cost; ``round_robin`` is there to be compared with.
        images: What images are taken, and from where.
        slo: What requests are meant to see, and whether those that will not are refused.
        keys_file: One ``NAME KEY`` or ``NAME sha256:HEX`` a line; absent = no keys wanted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    model_dir: Path
    model_name: str = "deepseek-flash"
    model_aliases: tuple[str, ...] = ()
    router_id: str = "router-0"

    registry_url: str = "redis://127.0.0.1:6379/0"
    registry_namespace: str = Field(default="epdserve", pattern=r"^[a-z][a-z0-9-]{0,40}$")
    registry_lease_s: float = Field(default=5.0, gt=0)
    registry_refresh_s: float = Field(default=0.25, gt=0)
    cluster_token_file: Path | None = None

    default_thinking: bool = True
    default_effort: int = Field(75, ge=1, le=100)
    max_context_tokens: int = Field(default=1_048_576, ge=2)
    max_completion_tokens: int = Field(default=0, ge=0)
    official_sampling: bool = False
    strict_official: bool = False
    stop_in_reasoning: bool = False
    unwrap_arguments: bool = True

    max_body_bytes: int = Field(default=8 * 2**20, ge=1024)
    max_bodies_bytes: int = Field(default=256 * 2**20, ge=1024)
    max_header_bytes: int = Field(default=32 * 1024, ge=1024)
    header_timeout_s: float = Field(default=10.0, gt=0)
    body_timeout_s: float = Field(default=30.0, gt=0)
    max_connections: int = Field(default=4096, ge=1)
    max_in_flight_requests: int = Field(default=512, ge=1)
    max_in_flight_tokens: int = Field(default=4_000_000, ge=1)

    request_deadline_s: float = Field(default=600.0, gt=0)
    decode_stall_s: float = Field(default=60.0, gt=0)
    replacement_wait_s: float = Field(default=20.0, ge=0)
    release_timeout_s: float = Field(default=2.0, gt=0)
    max_resumes: int = Field(default=3, ge=0)
    memo_bytes: int = Field(default=64 * 2**20, ge=0)
    tokens_per_event: int = Field(default=0, ge=0)
    keep_alive_s: float = Field(default=12.0, gt=0)
    keep_alive_whole: bool = True
    send_stall_s: float = Field(default=30.0, gt=0)
    drain_timeout_s: float = Field(default=30.0, gt=0)

    placement: Literal["cost", "round_robin"] = "cost"

    images: ImageSettings = ImageSettings()

    slo: SloSettings = SloSettings()

    keys_file: Path | None = None
    tenancy: TenancySettings = TenancySettings()
    isolation: Literal["none", "key", "user"] = "none"
