"""What a layer asks for: products with its weights, and the caches of one step.

There are two ways to give it. ``wide``: float32 values and float32 products, on any device and in every precision; the
reference. ``packed``: weights and caches as they are stored, by the kernels. A backbone takes one of them when it is
built (``model/ways.py``), and a layer never asks which.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from epdserve.model.batch import EntryPlan, ForwardBatch, QueryRows, Rotation, WindowPlan
from epdserve.model.layer_plan import LayerSpec
from epdserve.model.pools import KVPools


class Projection(Protocol):
    """A linear layer. The row is rounded to FP8 before a weight that is stored in FP8, where the precision says so."""

    def __call__(self, x: Any) -> torch.Tensor:
        """(T, K), or what ``Memory.lookup`` gave -> (T, N)."""


class Experts(Protocol):
    """Routed experts and the shared one."""

    def __call__(
        self, x_TD: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> torch.Tensor:
        """(T, hidden) -> (T, hidden): each row's choices weighted and summed, then the shared expert."""


class Memory(Protocol):
    """Where table rows of Engram come from: device memory here; host memory or a prefetcher behind the same call."""

    def lookup(self, rows_TC: torch.Tensor) -> Any:
        """(T, C) int64 row ids -> C rows side by side, as a projection takes them."""


class IndexQueries(NamedTuple):
    """Query side of a row's choice."""

    q_THI: torch.Tensor  # rotated, not yet rounded
    w_TH: torch.Tensor  # float32, softmax scale included


class Caches(Protocol):
    """Pages and state slots as the layers of one forward meet them; dropped with it."""

    def write_window(self, layer: int, kv_TD: torch.Tensor, rotation: Rotation, plan: WindowPlan) -> Any:
        """Rotate, round and store window rows of a layer; what ``attend`` takes as its keys."""

    def write_entries(
        self, layer: int, latent_ND: torch.Tensor, key_NI: torch.Tensor, plan: EntryPlan
    ) -> None:
        """Rotate, round and store main KV and indexer keys of the entries of ``plan``."""

    def select(self, spec: LayerSpec, rows: QueryRows, queries: Callable[[], IndexQueries]) -> None:
        """Choose the entries that this layer and the Reuse layers after it attend to.

        ``queries`` is called if there is anything to choose. The candidate source leaves its blocks to the Reindex
        layers after it.
        """

    def attend(
        self,
        spec: LayerSpec,
        q_THD: torch.Tensor,
        keys: Any,
        sink_H: torch.Tensor,
        rotation: Rotation,
        rows: QueryRows,
        plan: WindowPlan,
    ) -> torch.Tensor:
        """(T, H, D) rotated queries -> (T, H, D) in their type, rotated back."""

    def entries(self, index_source: int) -> torch.Tensor:
        """(T, K) what the last ``select`` of a layer chose, ascending, -1 = none."""


class Arithmetic(Protocol):
    """Gives a model's layers their weights. Names are those of ``tensor_map.py``."""

    def tensor(self, name: str) -> torch.Tensor:
        """A plain tensor: norms, biases, constants."""

    def projection(self, *names: str, quantized: bool, out_dtype: torch.dtype | None = None) -> Projection:
        """One product with one weight or several, their outputs side by side.

        Args:
            quantized: Whether the checkpoint stores them in FP8.
            out_dtype: Of the result; the activation type if None.
        """

    def grouped_projection(self, name: str, groups: int) -> Projection:
        """(T, G, K) -> (T, G, N) in the activation type: a group of rows of the weight each. Inputs are not rounded."""

    def experts(self, prefix: str) -> Experts:
        """Experts below ``prefix``."""

    def memory(self, prefix: str) -> Memory:
        """Engram table below ``prefix``."""

    def caches(self, batch: ForwardBatch, pools: KVPools) -> Caches:
        """Caches of one forward."""
