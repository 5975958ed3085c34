"""Refusing early what is expected to come too late: the gate of ``services.policy`` with this router's measurements.

Off by default: an expectation is only as good as the speeds it rests on, and a router that has just begun has none.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from epdserve.services.errors import Overloaded
from epdserve.services.policy.fairness import ServiceMeter
from epdserve.services.policy.forecast import LengthForecast
from epdserve.services.policy.gate import Answer, GateSettings, Outlook, SloClass, Verdict, decide
from epdserve.services.policy.joint import Decision
from epdserve.services.router.estimates import Estimates
from epdserve.services.router.request import GenerateRequest
from epdserve.services.router.routing import Route
from pydantic import BaseModel, ConfigDict, Field


class SloSettings(BaseModel):
    """What requests are meant to see.

    Attributes:
        ttft_target_s, tpot_target_s: Placement weighs by them in any case.
        refuse_late: Answer 429 to what is expected to miss them, before anything is spent on it.
        margin: A target counts as missed from this multiple of it on.
        fair_from: Share of a target from which tenants above their fair share are refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_target_s: float = Field(default=2.0, gt=0)
    tpot_target_s: float = Field(default=0.05, gt=0)
    refuse_late: bool = False
    margin: float = Field(default=1.0, gt=0)
    fair_from: float = Field(default=0.9, gt=0)


class Foresight:
    """Asks the gate for each new request. Owned by the event loop.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(
        self, settings: SloSettings, estimates: Estimates, clock: Callable[[], float] = monotonic
    ) -> None:
        self._slo = SloClass("all", settings.ttft_target_s, settings.tpot_target_s)
        self._gate = GateSettings(settings.margin, settings.margin, fair_from=settings.fair_from)
        self._refuse_late = settings.refuse_late
        self._estimates = estimates
        self._clock = clock
        self._meter = ServiceMeter()
        self.refused: dict[str, int] = {"ttft": 0, "tpot": 0, "share": 0}

    def admit(self, request: GenerateRequest, route: Route, forecast: LengthForecast) -> None:
        """Let a request that has found its place go on.

        Raises:
            Overloaded: It is expected to miss a target, or others of its tenant have taken its share.
        """
        if not self._refuse_late or (decision := route.decision) is None:
            return
        now, tenant = self._clock(), request.tenant_key.hex()
        cost_s = self._cost_s(route, decision, forecast)
        self._meter.asked(tenant, cost_s, now=now)
        answer = self._ask(decision, tenant, now)
        if answer.verdict is Verdict.REFUSE:
            self.refused[answer.reason] += 1
            raise Overloaded(
                f"expected to take {answer.pressure:.1f} of the target ({answer.reason})",
                retry_after_s=answer.retry_after_s,
            )
        self._meter.given(tenant, cost_s, now=now)

    def _ask(self, decision: Decision, tenant: str, now: float) -> Answer:
        chosen = decision.chosen
        outlook = Outlook(chosen.ttft_s, chosen.tpot_s)
        answer = decide(outlook, self._slo, settings=self._gate)
        if answer.verdict is Verdict.ENTER and answer.pressure > self._gate.fair_from:
            over = self._meter.over_share(tenant, now=now)
            answer = decide(
                Outlook(chosen.ttft_s, chosen.tpot_s, over_share=over), self._slo, settings=self._gate
            )
        return answer

    def _cost_s(self, route: Route, decision: Decision, forecast: LengthForecast) -> float:
        """Seconds of workers: of prefill, and a request's part of the decode steps it takes part in."""
        speed = self._estimates.prefill_tokens_per_s(route.prefill.worker)
        step_s = self._estimates.step_s(route.decode.worker)
        return decision.compute_tokens / speed + forecast.mean * step_s / max(1, route.decode.running)
