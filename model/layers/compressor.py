"""Tokens -> compressed entries: main KV and indexer keys of a KV source layer (spec/backbone 4)."""

from collections.abc import Mapping

import torch
from epdserve.kernels.compress import pool_pairs
from epdserve.kernels.linear import linear
from epdserve.kernels.norm import rms_norm
from epdserve.kernels.rope import apply_rope
from epdserve.model.batch import EntryPlan
from epdserve.model.config import ModelConfig
from epdserve.model.layer_plan import LayerSpec
from epdserve.model.layers.context import ForwardContext
from epdserve.model.layers.linear import Linear
from epdserve.model.precision import Precision


class Compressor:
    """Publishes the entries whose last token is among the rows, and keeps the open pair of ratio 2."""

    def __init__(
        self, config: ModelConfig, spec: LayerSpec, weights: Mapping[str, torch.Tensor], precision: Precision
    ) -> None:
        prefix = f"layers.{spec.index}.attn."
        self.spec, self.eps, self.dtype = spec, config.text.rms_norm_eps, precision.activation_dtype
        self.wkv_DK = weights[prefix + "compressor.wkv.weight"]
        self.wgate_DK = weights[prefix + "compressor.wgate.weight"] if spec.ratio == 2 else None
        self.norm = weights[prefix + "compressor.norm.weight"]
        self.wk = Linear(weights[prefix + "indexer.wk.weight"], precision, quantized=False)
        self.k_norm = weights[prefix + "indexer.k_norm.weight"]

    def publish(self, x_TD: torch.Tensor, context: ForwardContext) -> None:
        """Write the entries that close in this step into their pages. ``x_TD``: (all rows, hidden), normed."""
        plan = context.batch.entries[self.spec.ratio]
        pooled_ND = self._pool(x_TD, plan, context).to(self.dtype)
        latent_ND = rms_norm(pooled_ND, self.norm, self.eps)
        key_NI = rms_norm(self.wk(latent_ND), self.k_norm, self.eps)
        cos, sin = plan.rotation
        plane = context.pools.planes[self.spec.index]
        main = context.codec.encode_main(apply_rope(latent_ND, cos, sin))
        index = context.codec.encode_index(apply_rope(key_NI, cos, sin))
        plane.write(plan.pages_N, plan.entries_N, main, index)

    def _pool(self, x_TD: torch.Tensor, plan: EntryPlan, context: ForwardContext) -> torch.Tensor:
        content_TD = linear(x_TD.float(), self.wkv_DK)
        if self.wgate_DK is None:
            return content_TD[plan.closing_N]
        # (content, gate) of the token that opened a group waits in the slot when the group spans two steps.
        pair_T2D = torch.stack([content_TD, linear(x_TD.float(), self.wgate_DK)], dim=1)
        stored_S2D = context.pools.open_pairs[self.spec.index]
        opening_N2D = torch.where(
            plan.from_slot_N[:, None, None], stored_S2D[plan.slots_N], pair_T2D[plan.opening_N]
        )
        closing_N2D = pair_T2D[plan.closing_N]
        stored_S2D[plan.store_slots_M] = pair_T2D[plan.store_rows_M]
        return pool_pairs(opening_N2D[:, 0], opening_N2D[:, 1], closing_N2D[:, 0], closing_N2D[:, 1])
