"""Tokens -> compressed entries: main KV and indexer keys of a KV source layer (spec/backbone 4)."""

import torch
from epdserve.kernels.compress import pool_entries
from epdserve.kernels.norm import rms_norm
from epdserve.model.batch import EntryPlan
from epdserve.model.config import ModelConfig
from epdserve.model.layer_plan import LayerSpec
from epdserve.model.layers.arithmetic import Arithmetic
from epdserve.model.layers.context import ForwardContext


class Compressor:
    """Publishes the entries whose last token is among the rows, and keeps the open pair of ratio 2."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, math: Arithmetic) -> None:
        prefix = f"layers.{spec.index}.attn."
        self.spec, self.eps, self.dim = spec, config.text.rms_norm_eps, config.text.head_dim
        names = [prefix + "compressor.wkv.weight"]
        if spec.ratio == 2:  # content and gate side by side; both stay in float32
            names.append(prefix + "compressor.wgate.weight")
        self.pair = math.projection(*names, quantized=False, out_dtype=torch.float32)
        self.norm = math.tensor(prefix + "compressor.norm.weight")
        self.wk = math.projection(prefix + "indexer.wk.weight", quantized=False)
        self.k_norm = math.tensor(prefix + "indexer.k_norm.weight")

    def publish(self, x_TD: torch.Tensor, context: ForwardContext) -> None:
        """Write the entries that close in this step into their pages. ``x_TD``: (all rows, hidden), normed."""
        plan = context.batch.entries[self.spec.ratio]
        pooled_ND = self._pool(x_TD, plan, context).to(x_TD.dtype)
        latent_ND = rms_norm(pooled_ND, self.norm, self.eps)
        key_NI = rms_norm(self.wk(latent_ND), self.k_norm, self.eps)
        context.caches.write_entries(self.spec.index, latent_ND, key_NI, plan)

    def _pool(self, x_TD: torch.Tensor, plan: EntryPlan, context: ForwardContext) -> torch.Tensor:
        pair_TC = self.pair(x_TD)
        if self.spec.ratio == 1:
            return pair_TC[plan.closing_N]
        # The token that opened a group waits in the slot when the group spans two steps.
        return pool_entries(
            pair_TC[:, : self.dim],
            pair_TC[:, self.dim :],
            context.pools.open_pairs[self.spec.index],
            plan.opening_N,
            plan.opened_in_N,
            plan.closing_N,
            plan.store_slots_M,
            plan.store_rows_M,
        )
