"""CSA2: one softmax over the sliding window and selected compressed entries (spec/backbone 3-5).

The module is cut in two so that the layer at the replay cut can write KV for every row and attend only with the kept
ones: ``write_kv`` first, then ``attend``.
"""

from collections.abc import Mapping

import torch
from epdserve.kernels.attention import sink_attention
from epdserve.kernels.linear import grouped_linear
from epdserve.kernels.norm import rms_norm
from epdserve.kernels.rope import apply_rope, apply_rope_inverse
from epdserve.model.batch import QueryRows, WindowPlan
from epdserve.model.config import ModelConfig
from epdserve.model.layer_plan import LayerMode, LayerSpec
from epdserve.model.layers.compressor import Compressor
from epdserve.model.layers.context import ForwardContext
from epdserve.model.layers.indexer import Indexer
from epdserve.model.layers.linear import Linear
from epdserve.model.precision import Precision


class Attention:
    """One attention sub-block in any of the four layer modes."""

    def __init__(
        self, config: ModelConfig, spec: LayerSpec, weights: Mapping[str, torch.Tensor], precision: Precision
    ) -> None:
        text, prefix = config.text, f"layers.{spec.index}.attn."
        self.spec, self.eps = spec, text.rms_norm_eps
        self.heads, self.head_dim, self.groups = text.num_attention_heads, text.head_dim, text.o_groups
        self.dtype = precision.activation_dtype
        self.wq_a = Linear(weights[prefix + "wq_a.weight"], precision, quantized=True)
        self.wq_b = Linear(weights[prefix + "wq_b.weight"], precision, quantized=True)
        self.wkv = Linear(weights[prefix + "wkv.weight"], precision, quantized=True)
        self.wo_b = Linear(weights[prefix + "wo_b.weight"], precision, quantized=True)
        # The reference widens wo_a exactly and does not round its input (spec/backbone 10, item 1).
        self.wo_a_GNK = weights[prefix + "wo_a.weight"].unflatten(0, (text.o_groups, text.o_lora_rank))
        self.q_norm = weights[prefix + "q_norm.weight"]
        self.kv_norm = weights[prefix + "kv_norm.weight"]
        self.sink_H = weights[prefix + "attn_sink"].float()
        is_source = spec.mode is LayerMode.FULL
        self.compressor = Compressor(config, spec, weights, precision) if is_source else None
        self.indexer = Indexer(config, spec, weights, precision) if spec.index_source == spec.index else None

    def write_kv(
        self, x_TD: torch.Tensor, rows: QueryRows, plan: WindowPlan, context: ForwardContext
    ) -> torch.Tensor:
        """Write window rows and, in a KV source, compressed entries of ``x_TD`` (normed attention input).

        Returns:
            (S * R + T, D) float32: window keys, as ``WindowPlan.index_TW`` counts them.
        """
        if self.compressor is not None:
            self.compressor.publish(x_TD, context)
        kv_TD = rms_norm(self.wkv(x_TD), self.kv_norm, self.eps)
        kv_TD = apply_rope(kv_TD, *self._rotation(rows))
        new_rows, new_values = context.codec.encode_window(kv_TD)
        windows = context.pools.windows[self.spec.index]
        ring_SRB = windows.index_select(0, context.batch.slots_S)
        keys = torch.cat([context.codec.decode_window(ring_SRB).flatten(0, 1), new_values])
        windows.flatten(0, 1).index_copy_(0, plan.write_places_N, new_rows.index_select(0, plan.write_rows_N))
        return keys

    def attend(
        self,
        x_TD: torch.Tensor,
        keys_KD: torch.Tensor,
        rows: QueryRows,
        plan: WindowPlan,
        context: ForwardContext,
    ) -> torch.Tensor:
        """(T, hidden) normed input of ``rows`` -> (T, hidden)."""
        qr = rms_norm(self.wq_a(x_TD), self.q_norm, self.eps)
        cos, sin = self._rotation(rows)
        q_THD = apply_rope(self.wq_b(qr).unflatten(-1, (self.heads, self.head_dim)), cos, sin)
        kv_TND = keys_KD.index_select(0, plan.index_TW.flatten()).view(*plan.index_TW.shape, -1)
        valid_TN = plan.valid_TW
        if self.spec.ratio:
            if self.indexer is not None:
                self.indexer.select(x_TD, qr, rows, context)
            selection = context.selections[self._index_source()]
            kv_TND = torch.cat([kv_TND, selection.kv_TKD], dim=1)
            valid_TN = torch.cat([valid_TN, selection.entries_TK >= 0], dim=1)
        o_THD = sink_attention(q_THD.float(), kv_TND, valid_TN, self.sink_H, self.head_dim**-0.5)
        o_THD = apply_rope_inverse(o_THD.to(self.dtype), cos, sin)
        o_TGK = o_THD.unflatten(1, (self.groups, -1)).flatten(2).float()
        return self.wo_b(grouped_linear(o_TGK, self.wo_a_GNK).to(self.dtype).flatten(1))

    def _rotation(self, rows: QueryRows) -> tuple[torch.Tensor, torch.Tensor]:
        return rows.compressed_rotation if self.spec.ratio else rows.window_rotation

    def _index_source(self) -> int:
        assert self.spec.index_source is not None, (
            f"layer {self.spec.index} reads a cache without an index source"
        )
        return self.spec.index_source
