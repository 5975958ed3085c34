"""What Prometheus reads of the policies is what they know."""

from __future__ import annotations

import re

from epdserve.services.policy.length_model import PromptClass
from epdserve.services.router.estimates import Estimates
from epdserve.services.router.foresight import Foresight
from epdserve.services.router.policy_metrics import PolicyCollector
from epdserve.services.router.slo import SloSettings
from epdserve.services.types import KVHandle, PrefillResult, TailRef
from prometheus_client import CollectorRegistry, generate_latest


def values(estimates: Estimates, foresight: Foresight) -> dict[str, float]:
    registry = CollectorRegistry()
    PolicyCollector(estimates, foresight, None, registry)
    lines = re.findall(
        r"^epdserve_router_(\S+) (\S+)$", generate_latest(registry).decode(), flags=re.MULTILINE
    )
    return {name: float(value) for name, value in lines}


def test_calibration_and_misses_are_told() -> None:
    estimates = Estimates()
    foresight, kind = Foresight(SloSettings(), estimates), PromptClass(75, "t", 100)
    for number in range(50):
        # Every fourth answer is far longer than anything before it
        tokens = 100 if number % 4 else 100_000
        estimates.lengths.observe(kind, tokens, forecast=estimates.lengths.forecast(kind))
    handle = KVHandle("p0", "1", "lease", (), TailRef(0, 1, 4096, 0, True), 512)
    for cached in (512, 100):
        estimates.prefilled("p0", PrefillResult(handle, cached, 0, 10, 0.0, 1.0), expected_hit_tokens=512)
    for _ in range(80):
        foresight.hindsight.expect("r", ttft_s=1.0, tpot_s=0.05, ttft_target_s=2.0, tpot_target_s=0.05)
        foresight.hindsight.began("r", 3.0)
    told, fared = values(estimates, foresight), estimates.lengths.calibration
    assert told["length_answers_total"] == fared.answers == 50
    assert told["length_covered_total"] == fared.covered
    assert told["length_coverage_ratio"] == fared.recent_coverage
    assert told["length_bias_octaves"] == fared.bias
    assert told["index_stale_ratio"] == 412 / 1024
    assert told["misroute_ratio"] == 0.5
    assert 0 < told["decode_request_ratio"] < 0.3
    assert told['outlook_ratio{what="ttft"}'] > 2.9
    assert told['outlook_ratio{what="tpot"}'] == 1.0
