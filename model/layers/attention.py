"""CSA2: one softmax over the sliding window and selected compressed entries (spec/backbone 3-5).

The module is cut in two so that the layer at the replay cut can write KV for every row and attend only with the kept
ones: ``write_kv`` first, then ``attend``.
"""

from typing import Any

import torch
from epdserve.kernels.norm import rms_norm
from epdserve.kernels.rope import apply_rope
from epdserve.model.batch import QueryRows, Rotation, WindowPlan
from epdserve.model.config import ModelConfig
from epdserve.model.layer_plan import LayerMode, LayerSpec
from epdserve.model.layers.arithmetic import Arithmetic
from epdserve.model.layers.compressor import Compressor
from epdserve.model.layers.context import ForwardContext
from epdserve.model.layers.indexer import Indexer


class Attention:
    """One attention sub-block in any of the four layer modes."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, math: Arithmetic) -> None:
        text, prefix = config.text, f"layers.{spec.index}.attn."
        self.spec, self.eps = spec, text.rms_norm_eps
        self.heads, self.head_dim, self.groups = text.num_attention_heads, text.head_dim, text.o_groups
        self.wq_a = math.projection(prefix + "wq_a.weight", quantized=True)
        self.wq_b = math.projection(prefix + "wq_b.weight", quantized=True)
        self.wkv = math.projection(prefix + "wkv.weight", quantized=True)
        self.wo_b = math.projection(prefix + "wo_b.weight", quantized=True)
        # The reference widens wo_a exactly and does not round its input (spec/backbone 10, item 1).
        self.wo_a = math.grouped_projection(prefix + "wo_a.weight", text.o_groups)
        self.q_norm = math.tensor(prefix + "q_norm.weight")
        self.kv_norm = math.tensor(prefix + "kv_norm.weight")
        self.sink_H = math.tensor(prefix + "attn_sink").float()
        is_source = spec.mode is LayerMode.FULL
        self.compressor = Compressor(config, spec, math) if is_source else None
        self.indexer = Indexer(config, spec, math) if spec.index_source == spec.index else None

    def write_kv(self, x_TD: torch.Tensor, rows: QueryRows, plan: WindowPlan, context: ForwardContext) -> Any:
        """Write window rows and, in a KV source, compressed entries of ``x_TD`` (normed attention input).

        Returns:
            Window keys as the caches take them back in ``attend``.
        """
        if self.compressor is not None:
            self.compressor.publish(x_TD, context)
        kv_TD = rms_norm(self.wkv(x_TD), self.kv_norm, self.eps)
        return context.caches.write_window(self.spec.index, kv_TD, self._rotation(rows), plan)

    def attend(
        self, x_TD: torch.Tensor, keys: Any, rows: QueryRows, plan: WindowPlan, context: ForwardContext
    ) -> torch.Tensor:
        """(T, hidden) normed input of ``rows`` -> (T, hidden)."""
        qr_TR = rms_norm(self.wq_a(x_TD), self.q_norm, self.eps)
        rotation = self._rotation(rows)
        q_THD = apply_rope(self.wq_b(qr_TR).unflatten(-1, (self.heads, self.head_dim)), *rotation)
        if self.indexer is not None:
            self.indexer.select(x_TD, qr_TR, rows, context)
        o_THD = context.caches.attend(self.spec, q_THD, keys, self.sink_H, rotation, rows, plan)
        o_TGK = o_THD.unflatten(1, (self.groups, -1)).flatten(2)
        return self.wo_b(self.wo_a(o_TGK).flatten(1))

    def _rotation(self, rows: QueryRows) -> Rotation:
        return rows.compressed_rotation if self.spec.ratio else rows.window_rotation
