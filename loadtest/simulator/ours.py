"""The production policies behind the simulator's interface: the same functions, fed from a view."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt
from epdserve.loadtest.simulator.baselines import Parameters
from epdserve.loadtest.simulator.hardware import KV_BYTES_PER_TOKEN, TAIL_BYTES, WINDOW, Timing
from epdserve.loadtest.simulator.requests import Request
from epdserve.loadtest.simulator.run import Routed
from epdserve.loadtest.simulator.view import View, size_of
from epdserve.loadtest.simulator.workers import Job
from epdserve.services.policy.fairness import ServiceMeter
from epdserve.services.policy.forecast import LengthForecast, fixed
from epdserve.services.policy.gate import (
    Answer,
    GateSettings,
    Outlook,
    SloClass,
    Verdict,
    decide,
    lowering_pays,
)
from epdserve.services.policy.health import Seen, trouble_s
from epdserve.services.policy.hindsight import Hindsight
from epdserve.services.policy.joint import Decision, PlacementSettings, Placing, place
from epdserve.services.policy.length_model import LengthModel, PromptClass
from epdserve.services.policy.pools import DecodePool, Floats, Links, PrefillPool, WorkerNames, floats
from epdserve.services.policy.settings import PolicySettings

_BLIND: Final = fixed(512)


@dataclass(frozen=True, slots=True)
class Parts:
    """What of ours is switched on; all of it but in ablations."""

    lengths: bool = True
    tier_weights: bool = True
    joint: bool = True
    gate: bool = True
    order: bool = True
    fairness: bool = True
    floor: bool = True
    hindsight: bool = True


class Ours:
    """Length model, joint placement, gate, fair shares.

    Args:
        parameters: Of the policies, by name; ``passing`` is the share of longer queued work that counts as ahead.
    """

    name: ClassVar[str] = "epdserve"
    defaults: ClassVar[Parameters] = {
        "prefill_crowd": 1.0,
        "decode_crowd": 1.0,
        "slack_per_s": 0.2,
        "ttft_margin": 1.0,
        "tpot_margin": 0.97,
        "passing": 0.5,
        "own_gain": 30.0,
        "wait_gain": 1.5,
        "tpot_gain": 0.02,
    }
    choices: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "prefill_crowd": (0.3, 1.0, 3.0),
        "slack_per_s": (0.05, 0.2, 0.6),
        "ttft_margin": (0.7, 0.85, 1.0, 1.2),
        "tpot_margin": (0.9, 1.0, 1.1),
        "passing": (0.2, 0.5, 0.8),
    }

    def __init__(
        self, parameters: Parameters | None = None, *, seed: int = 0, parts: Parts = Parts()
    ) -> None:
        self.parameters = {**self.defaults, **(parameters or {})}
        self.parts = parts
        self.urgent = parts.order
        self._policy = self._settings_of(parts)
        self.model = LengthModel(self._policy.lengths)
        self._meter = ServiceMeter(self._policy.fairness)
        self.hindsight = Hindsight()  # one for all routers, where each really has its own
        self._timing: Timing | None = None
        self._granted: dict[int, int] = {}
        self._forecasts: dict[int, LengthForecast] = {}

    def _settings_of(self, parts: Parts) -> PolicySettings:
        known = self.parameters
        placement = PlacementSettings(
            prefill_crowd=known["prefill_crowd"],
            decode_crowd=known["decode_crowd"],
            slack_per_s=known["slack_per_s"],
            tier_weights=parts.tier_weights,
            use_lengths=parts.lengths,
            use_transfer=parts.joint,
        )
        gains = ("ttft_margin", "tpot_margin", "own_gain", "wait_gain", "tpot_gain")
        return PolicySettings(placement, GateSettings(**{name: known[name] for name in gains}))

    def route(self, request: Request, view: View, now: float) -> Routed | None:
        """Forecast, place, ask the gate, lower the effort if that is the answer."""
        self._timing = view.cluster.spec.timing
        effort = self._granted.get(request.session, request.effort)
        forecast = self._forecast(request, effort)
        decision = self._place(request, view, forecast, now)
        chosen = decision.chosen
        if self.parts.gate:
            answer, lowered = self._ask(request, view, decision, forecast, effort, now)
            if answer.verdict is Verdict.REFUSE:
                self.hindsight.refused()
                return None
            if lowered is not None:
                effort, forecast = request.floor, lowered
                self._granted[request.session] = effort
            targets = request.targets
            self.hindsight.expect(
                str(request.number),
                ttft_s=chosen.ttft_s,
                tpot_s=chosen.tpot_s,
                ttft_target_s=targets.ttft_s,
                tpot_target_s=targets.tpot_s,
            )
        self._meter.given(request.tenant, self._cost_s(view, decision, forecast), now=now)
        self._forecasts[request.number] = forecast
        return Routed(
            int(chosen.prefill[1:]), int(chosen.decode[1:]), effort, chosen.hit_tokens, forecast.mean
        )

    def again(self, job: Job, view: View, now: float) -> Routed:
        """Another place for all that is to be prefilled now; the gate is not asked again."""
        forecast = self._forecasts[job.request.number]
        request = replace(job.request, prompt_tokens=job.prompt_tokens)
        chosen = self._place(request, view, forecast, now).chosen
        return Routed(
            int(chosen.prefill[1:]), int(chosen.decode[1:]), job.effort, chosen.hit_tokens, forecast.mean
        )

    def began(self, job: Job, now: float) -> None:
        """Compare what was expected of the first token."""
        self.hindsight.began(str(job.request.number), now - job.request.arrives_at)

    def finished(self, job: Job, now: float) -> None:
        """Learn, and count what was really used."""
        request, timing = job.request, self._timing
        more = job.output_tokens - 1
        self.hindsight.ended(str(request.number), (now - job.first_token_at) / more if more > 0 else None)
        forecast = self._forecasts.pop(request.number)
        if timing is not None:
            more_s = (job.output_tokens - forecast.mean) * timing.slot_s
            self._meter.given(request.tenant, more_s, now=now)
            self._meter.asked(request.tenant, more_s, now=now)
        if self.parts.lengths:
            self.model.observe(_class_of(request, job.effort), job.output_tokens, forecast=forecast)

    def _forecast(self, request: Request, effort: int) -> LengthForecast:
        return self.model.forecast(_class_of(request, effort)) if self.parts.lengths else _BLIND

    def _place(self, request: Request, view: View, forecast: LengthForecast, now: float) -> Decision:
        cluster = view.cluster
        timing = cluster.spec.timing
        hits = view.hits(request)
        left = request.prompt_tokens - float(hits[3].max())
        size = size_of(left) + 1
        ahead = view.prefill_tokens[:size].sum(axis=0)
        longer = view.prefill_tokens[size:].sum(axis=0)
        passing = self.parameters["passing"] if self.parts.order else 1.0
        count = len(view.prefill_requests)
        prefills = PrefillPool(
            _names("p", count),
            np.asarray(cluster.prefill_machines),
            ahead + passing * longer,
            timing.prefill_tokens_per_s / view.prefill_slowness,
            hits,
            floats(timing.tier_bytes_per_s),
            _trouble_s(view, "prefill", view.prefill_draining),
        )
        links = Links(
            timing.same_machine_bytes_per_s,
            timing.other_machine_bytes_per_s,
            timing.link_latency_s,
            TAIL_BYTES,
            timing.link_latency_s,
        )
        wanted = Placing(
            str(request.number),
            request.prompt_tokens,
            forecast,
            request.targets.ttft_s,
            request.targets.tpot_s,
            KV_BYTES_PER_TOKEN,
            WINDOW,
            request.blocks[0].to_bytes(8, "little") if request.blocks else b"",
            now - view.refreshed_at,
        )
        return place(prefills, _decode_pool(view), links, wanted, self._policy.placement)

    def _ask(
        self,
        request: Request,
        view: View,
        decision: Decision,
        forecast: LengthForecast,
        effort: int,
        now: float,
    ) -> tuple[Answer, LengthForecast | None]:
        """The gate's answer, and the forecast at the floor if that is what it grants."""
        chosen = decision.chosen
        slowness = float(view.prefill_slowness[int(chosen.prefill[1:])])
        speed = view.cluster.spec.timing.prefill_tokens_per_s / slowness
        known = self.hindsight if self.parts.hindsight else Hindsight()
        outlook = Outlook(
            chosen.ttft_s * known.ttft,
            chosen.tpot_s * known.tpot,
            alone_ttft_s=decision.compute_tokens / speed,
            hit_tokens=chosen.hit_tokens,
            prefill_tokens_per_s=speed,
        )
        targets = request.targets
        slo = SloClass(targets.name, targets.ttft_s, targets.tpot_s, targets.room)
        if self.parts.fairness:
            self._meter.asked(request.tenant, self._cost_s(view, decision, forecast), now=now)
            outlook = replace(outlook, excess=self._meter.excess(request.tenant, now=now))
        answer = decide(outlook, slo, settings=self._policy.gate)
        if answer.verdict is Verdict.ENTER or not (self.parts.floor and request.floor < effort):
            return answer, None
        lowered = self._forecast(request, request.floor)
        pays = lowering_pays(outlook, forecast, lowered, same_conversation=request.turn > 1)
        answer = decide(outlook, slo, may_lower=pays, settings=self._policy.gate)
        return answer, lowered if answer.verdict is Verdict.LESS_EFFORT else None

    def _cost_s(self, view: View, decision: Decision, forecast: LengthForecast) -> float:
        """Seconds of workers: of prefill, and a request's part of the steps of a well filled decode worker."""
        timing = view.cluster.spec.timing
        return decision.compute_tokens / timing.prefill_tokens_per_s + forecast.mean * timing.slot_s


def variants() -> dict[str, Parts]:
    """Ours with one part off each: what that part is worth."""
    return {
        "all": Parts(),
        "without length model": Parts(lengths=False),
        "without tier weights": Parts(tier_weights=False),
        "without joint placement": Parts(joint=False),
        "without admission": Parts(gate=False),
        "without urgency order": Parts(order=False),
        "without hindsight": Parts(hindsight=False),
        "without fair shares": replace(Parts(), fairness=False),
        "without effort floor": Parts(floor=False),
    }


def _class_of(request: Request, effort: int) -> PromptClass:
    return PromptClass(effort, request.tenant, request.prompt_tokens, request.tools, request.turn)


def _decode_pool(view: View) -> DecodePool:
    """What a router would have fitted to reported steps: a constant, a part a request, a part a token."""
    cluster = view.cluster
    count = len(view.decode_running)
    step_s, request_s, token_s = _fit(cluster.spec.timing)
    now_s = step_s + request_s * view.decode_running + token_s * view.decode_held
    # A worker that is slower than its load explains is slow for all of it
    slow = np.maximum(1.0, view.decode_step_s / now_s)
    return DecodePool(
        _names("d", count),
        np.asarray(cluster.decode_machines),
        view.decode_running,
        view.decode_held,
        view.decode_remaining,
        np.full(count, float(cluster.spec.decode_tokens)),
        step_s * slow,
        request_s * slow,
        token_s * slow,
        np.zeros(count),
        _trouble_s(view, "decode", view.decode_draining),
    )


def _trouble_s(view: View, role: str, draining: npt.NDArray[np.bool_]) -> Floats:
    """Where a router leaves draining workers out, these come last here: arrays keep their length."""
    return trouble_s(Seen(draining=draining, failures=view.failures[role], calls=view.calls[role]))


@lru_cache(maxsize=16)
def _fit(timing: Timing) -> tuple[float, float, float]:
    request_s = (timing.decode_s(512, 0) - timing.decode_s(128, 0)) / 384
    token_s = (timing.decode_s(128, 1e7) - timing.decode_s(128, 0)) / 1e7
    return timing.decode_s(128, 0) - 128 * request_s, request_s, token_s


@lru_cache(maxsize=16)
def _names(letter: str, count: int) -> WorkerNames:
    return WorkerNames(f"{letter}{index:05}" for index in range(count))
