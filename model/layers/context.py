"""What the layers of one forward pass share: pools, batch, and results that later layers reuse.

A Reuse layer attends to what its index source selected, and a Reindex layer scores the keys of its KV source; both are
gathered and widened once a step (spec/backbone 4 and 5).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from epdserve.model.batch import ForwardBatch
from epdserve.model.entry_codec import EntryCodec
from epdserve.model.errors import ForwardStopped
from epdserve.model.pools import KVPools
from epdserve.model.precision import Precision


@dataclass(frozen=True, slots=True)
class Selection:
    """Compressed entries that each query attends to, ascending, padded on the right."""

    entries_TK: torch.Tensor  # int64, -1 = none
    kv_TKD: torch.Tensor  # float32, arbitrary where entries_TK is -1


@dataclass(slots=True)
class ForwardContext:
    """State of one forward; dropped with it. Keys of the dictionaries are layer indices."""

    batch: ForwardBatch
    pools: KVPools
    codec: EntryCodec
    precision: Precision
    selections: dict[int, Selection] = field(default_factory=dict)  # by index source
    candidates: list[torch.Tensor | None] = field(
        default_factory=list
    )  # by row group: (S', Q, E) bool, None = all
    unwanted: Callable[[], bool] | None = None  # asked before each layer

    def require_wanted(self) -> None:
        """Raises ``ForwardStopped`` if nobody wants the result any more."""
        if self.unwanted is not None and self.unwanted():
            raise ForwardStopped("nobody wants this step any more")
