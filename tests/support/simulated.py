"""A small simulated cluster, and one short workload, for tests that must be fast."""

from epdserve.loadtest.simulator.cluster import ClusterSpec
from epdserve.loadtest.simulator.run import Policy, Run, Simulation
from epdserve.loadtest.simulator.workloads import SHAPES, Mix, Workload, generate

SMALL = ClusterSpec(prefills=2, decodes=2, routers=2)


def workload(
    *, shape: str = "conversation", seconds: float = 2.0, rate: float = 30.0, seed: int = 1
) -> Workload:
    """About ``seconds * rate`` requests."""
    return generate(SHAPES[shape], seconds=seconds, rate=rate, seed=seed, mix=Mix())


def simulated(policy: Policy, *, spec: ClusterSpec = SMALL, requests: Workload | None = None) -> Run:
    """One run of a policy."""
    return Simulation(spec, policy, requests or workload()).run()
