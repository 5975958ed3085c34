"""All settings of the policies in one frozen object: router and simulator make one, and hand its parts on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from epdserve.services.policy.fairness import FairnessSettings
from epdserve.services.policy.gate import GateSettings
from epdserve.services.policy.health import HealthSettings
from epdserve.services.policy.joint import PlacementSettings
from epdserve.services.policy.length_model import LengthSettings
from epdserve.services.policy.pools import Links


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What decides: each part is said where it is used.

    Attributes:
        links: Between prefill and decode workers, until they are measured.
    """

    placement: PlacementSettings = field(default_factory=PlacementSettings)
    gate: GateSettings = field(default_factory=GateSettings)
    fairness: FairnessSettings = field(default_factory=FairnessSettings)
    lengths: LengthSettings = field(default_factory=LengthSettings)
    health: HealthSettings = field(default_factory=HealthSettings)
    links: Links = field(default_factory=Links)


USUAL: Final = PolicySettings()
