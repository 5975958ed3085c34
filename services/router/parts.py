"""What the endpoints of one router share, put together once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from epdserve.services.grammar.checking import GrammarChecks
from epdserve.services.observability.tracing import Tracing, tracing_from_environment
from epdserve.services.policy.admission import AdmissionLimits
from epdserve.services.router.admission import Admission, ByteBudget
from epdserve.services.router.cluster import Cluster
from epdserve.services.router.config import RouterConfig
from epdserve.services.router.foresight import Foresight
from epdserve.services.router.grants import Grants
from epdserve.services.router.images.opening import open_pictures
from epdserve.services.router.images.pictures import PictureDesk
from epdserve.services.router.ledger import InFlightLedger
from epdserve.services.router.memo import TurnMemo
from epdserve.services.router.metrics import RouterMetrics
from epdserve.services.router.pipeline import Pipeline, PipelineLimits
from epdserve.services.router.present import Present
from epdserve.services.router.rendering import ChatRenderer
from epdserve.services.router.routing import Placer, Targets
from epdserve.services.router.slo import policy_of
from epdserve.services.router.tenancy.assembly import build_gate
from epdserve.services.router.tenancy.body_limits import BodyLimits
from epdserve.services.router.tenancy.gate import TenantGate
from epdserve.services.router.tokenizer import RouterTokenizer

_STAY_SLACK_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class RouterParts:
    """Everything an endpoint may need; made by ``assemble``."""

    config: RouterConfig
    cluster: Cluster
    tokenizer: RouterTokenizer
    renderer: ChatRenderer
    placer: Placer
    pipeline: Pipeline
    admission: Admission
    bodies: ByteBudget
    gate: TenantGate
    heavy_renders: asyncio.Semaphore
    grammars: GrammarChecks
    memo: TurnMemo
    metrics: RouterMetrics
    foresight: Foresight
    grants: Grants
    pictures: PictureDesk | None = None
    present: Present = field(default_factory=Present)
    tracing: Tracing = field(default_factory=lambda: Tracing("epdserve-router", ""))

    @property
    def body_limits(self) -> BodyLimits:
        """What one body may hold."""
        return self.config.tenancy.body_limits

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names a request may give."""
        return (self.config.model_name, *self.config.model_aliases)


def assemble(
    config: RouterConfig,
    cluster: Cluster,
    *,
    clock: Callable[[], float],
    tokenizer: RouterTokenizer | None = None,
    metrics: RouterMetrics | None = None,
) -> RouterParts:
    """The parts of a router.

    Args:
        clock: Seconds, monotonic.
        tokenizer: Loaded from ``config.model_dir`` if absent.

    Raises:
        FileNotFoundError, ValueError: The model directory or the keys file will not do.
        InvalidRequest: Traces are to go somewhere that is no place.
    """
    tokenizer = tokenizer if tokenizer is not None else RouterTokenizer.from_directory(config.model_dir)
    ledger = InFlightLedger()
    targets = Targets(config.slo.ttft_target_s, config.slo.tpot_target_s)
    policy = policy_of(config.slo)
    placer = Placer(
        cluster, ledger, targets=targets, in_turn=config.placement == "round_robin", policy=policy
    )
    foresight = Foresight(config.slo, placer.estimates, clock, policy)
    limits = PipelineLimits(
        decode_stall_s=config.decode_stall_s,
        replacement_wait_s=config.replacement_wait_s,
        release_timeout_s=config.release_timeout_s,
        max_resumes=config.max_resumes,
        encode_first=config.images.encode_first,
    )
    pictures = open_pictures(config.model_dir, config.images, tokenizer)
    door = AdmissionLimits(config.max_in_flight_requests, config.max_in_flight_tokens)
    return RouterParts(
        config=config,
        cluster=cluster,
        tokenizer=tokenizer,
        renderer=ChatRenderer(tokenizer, takes_images=pictures is not None),
        placer=placer,
        pipeline=Pipeline(cluster, placer, ledger, limits, foresight),
        admission=Admission(door, clock),
        bodies=ByteBudget(max(config.max_bodies_bytes, config.max_body_bytes)),
        gate=build_gate(
            config.tenancy,
            keys_file=config.keys_file,
            redis_url=config.registry_url,
            namespace=config.registry_namespace,
            stay_ttl_s=config.request_deadline_s + _STAY_SLACK_S,
        ),
        heavy_renders=asyncio.Semaphore(max(1, (os.cpu_count() or 1) - 1)),  # one core is the event loop's
        grammars=GrammarChecks(),
        memo=TurnMemo(tokenizer, max_bytes=config.memo_bytes),
        metrics=metrics if metrics is not None else RouterMetrics(),
        foresight=foresight,
        grants=Grants(),
        pictures=pictures,
        tracing=tracing_from_environment("epdserve-router", config.router_id),
    )
