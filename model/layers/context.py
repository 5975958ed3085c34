"""What the layers of one forward pass share: batch, pools, and the caches with what later layers reuse."""

from collections.abc import Callable
from dataclasses import dataclass

from epdserve.model.batch import ForwardBatch
from epdserve.model.errors import ForwardStopped
from epdserve.model.layers.arithmetic import Caches
from epdserve.model.pools import KVPools


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """State of one forward; dropped with it."""

    batch: ForwardBatch
    pools: KVPools
    caches: Caches
    unwanted: Callable[[], bool] | None = None  # asked before each layer

    def require_wanted(self) -> None:
        """Raises ``ForwardStopped`` if nobody wants the result any more."""
        if self.unwanted is not None and self.unwanted():
            raise ForwardStopped("nobody wants this step any more")
