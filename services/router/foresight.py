"""Refusing early what is expected to come too late: the gate of ``services.policy`` with this router's measurements.

It also keeps what tenants have had lately, in seconds of workers, and tells workers how urgent a request is. Requests
that name a class or targets are refused when these are expected to be missed; others only if the settings say so: an
expectation is as good as the speeds it rests on, and a router that has just begun has none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Final

from epdserve.services.errors import Overloaded
from epdserve.services.policy.fairness import ServiceMeter
from epdserve.services.policy.forecast import LengthForecast
from epdserve.services.policy.gate import Answer, Outlook, Verdict, decide, lowering_pays
from epdserve.services.policy.hindsight import Hindsight
from epdserve.services.policy.joint import Decision
from epdserve.services.policy.settings import PolicySettings
from epdserve.services.router.estimates import Estimates
from epdserve.services.router.request import GenerateRequest, now
from epdserve.services.router.routing import Route
from epdserve.services.router.slo import SloSettings, policy_of
from epdserve.services.schedule import MAX_LENGTHS, Schedule

# A decode step is shared by so many at least: one that decodes alone takes nothing from anybody
_MANY: Final = 32
# Requests whose expected cost is remembered until they end
_OPEN: Final = 8192


class LessEffort(Overloaded):
    """The gate lets a request in at its floor: it is to be rendered again. Never leaves the router."""


class Foresight:
    """Asks the gate for each new request. Owned by the event loop.

    Args:
        clock: Seconds, monotonic.
        policy: Of gate and fair shares; None = as ``settings`` say.
    """

    def __init__(
        self,
        settings: SloSettings,
        estimates: Estimates,
        clock: Callable[[], float] = monotonic,
        policy: PolicySettings | None = None,
    ) -> None:
        policy = policy or policy_of(settings)
        self._gate = policy.gate
        self._settings = settings
        self._estimates = estimates
        self._clock = clock
        self._expected: OrderedDict[str, tuple[str, float, float]] = OrderedDict()
        self.meter = ServiceMeter(policy.fairness)
        self.hindsight = Hindsight()
        self.refused: dict[str, int] = {"ttft": 0, "tpot": 0, "share": 0}
        self.lowered = 0

    def admit(self, request: GenerateRequest, route: Route, forecast: LengthForecast) -> None:
        """Let a request that has found its place go on.

        Raises:
            LessEffort: At its floor it may.
            Overloaded: It is expected to miss a target, or others of its tenant have taken its share.
        """
        at = self._clock()
        slot_s = self._estimates.step_s(route.decode.worker) / max(_MANY, route.decode.running)
        computed = max(1, len(request.tokens) - route.hit_tokens)
        cost_s = (
            computed / self._estimates.prefill_tokens_per_s(route.prefill.worker) + forecast.mean * slot_s
        )
        self.meter.asked(request.tenant, cost_s, now=at)
        # Of a pair that is the only one, the decision is worked out only where it is needed
        wary = (self._settings.refuse_late or request.slo_asked) and not _let_in(request)
        if wary and (decision := route.decision) is not None:
            self._refuse_late(request, route, decision, forecast)
        self.meter.given(request.tenant, cost_s, now=at)
        self._expected[request.request_id] = (request.tenant, forecast.mean, slot_s)
        if len(self._expected) > _OPEN:
            self._expected.popitem(last=False)

    def schedule(self, request: GenerateRequest, forecast: LengthForecast) -> Schedule:
        """What workers are told of a request."""
        return Schedule(
            request.slo.ttft_s,
            max(0.0, now() - request.received_at) if request.received_at else 0.0,
            request.priority,
            self.meter.excess(request.tenant, now=self._clock(), weights=self._settings.weights),
            forecast.points[:MAX_LENGTHS],
        )

    def began(self, request: GenerateRequest) -> None:
        """A request's first token has come."""
        if request.received_at:
            self.hindsight.began(request.request_id, now() - request.received_at)

    def answered(self, request: GenerateRequest, tokens: int, *, decoded_s: float | None = None) -> None:
        """Count what a request has really taken in place of what was expected.

        Args:
            decoded_s: From its first token to its last.
        """
        tpot_s = None if decoded_s is None or tokens < 2 else decoded_s / (tokens - 1)
        self.hindsight.ended(request.request_id, tpot_s)
        known = self._expected.pop(request.request_id, None)
        if known is not None:
            tenant, expected, slot_s = known
            more_s = (tokens - expected) * slot_s
            self.meter.given(tenant, more_s, now=self._clock())
            self.meter.asked(tenant, more_s, now=self._clock())

    def _refuse_late(
        self, request: GenerateRequest, route: Route, decision: Decision, forecast: LengthForecast
    ) -> None:
        chosen, speed = decision.chosen, self._estimates.prefill_tokens_per_s(route.prefill.worker)
        outlook = Outlook(
            chosen.ttft_s * self.hindsight.ttft,
            chosen.tpot_s * self.hindsight.tpot,
            alone_ttft_s=decision.compute_tokens / speed,
            excess=self.meter.excess(request.tenant, now=self._clock(), weights=self._settings.weights),
            hit_tokens=chosen.hit_tokens,
            prefill_tokens_per_s=speed,
        )
        answer = self._ask(request, outlook, forecast)
        if answer.verdict is Verdict.LESS_EFFORT:
            self.lowered += 1
            raise LessEffort("the answer is expected to fit at a lower effort", retry_after_s=1.0)
        if answer.verdict is Verdict.REFUSE:
            self.refused[answer.reason] += 1
            self.hindsight.refused()
            raise Overloaded(
                f"expected to take {answer.pressure:.1f} of the {request.slo.name} target ({answer.reason})",
                retry_after_s=answer.retry_after_s,
            )
        self.hindsight.expect(
            request.request_id,
            ttft_s=chosen.ttft_s,
            tpot_s=chosen.tpot_s,
            ttft_target_s=request.slo.ttft_s,
            tpot_target_s=request.slo.tpot_s,
        )

    def _ask(self, request: GenerateRequest, outlook: Outlook, forecast: LengthForecast) -> Answer:
        answer = decide(outlook, request.slo, settings=self._gate)
        floor = request.effort_floor
        if answer.verdict is Verdict.ENTER or floor is None or request.effort is None:
            return answer
        lowered = self._estimates.forecast(replace(request, effort=floor))
        pays = floor.level < request.effort.level and lowering_pays(
            outlook, forecast, lowered, same_conversation=request.turn > 1
        )
        return decide(outlook, request.slo, may_lower=pays, settings=self._gate)


def _let_in(request: GenerateRequest) -> bool:
    """Whether this is what the gate offered a moment ago: the same request at its floor."""
    return request.turn == 1 and request.effort_asked is not None and request.effort != request.effort_asked
