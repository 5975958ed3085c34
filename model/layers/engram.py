"""Engram: conditional memory addressed by n-grams of the input (spec/modules 1)."""

from collections.abc import Mapping
from typing import Protocol

import torch
from epdserve.kernels.engram import engram_gate, ngram_rows
from epdserve.kernels.quant import decode_e4m3, decode_e8m0
from epdserve.model.batch import ForwardBatch, QueryRows
from epdserve.model.config import ModelConfig
from epdserve.model.engram_plan import EngramPlan
from epdserve.model.layers.linear import Linear
from epdserve.model.precision import Precision


class EngramTable(Protocol):
    """Where table rows come from: device memory here; host memory or a prefetcher behind the same call."""

    def lookup(self, rows_TC: torch.Tensor) -> torch.Tensor:
        """(T, C) int64 row ids -> (T, C * row width) float32, exact in bfloat16."""


class ResidentTable:
    """The whole table in the device's memory, in storage form.

    Args:
        codes: (rows, width) uint8 E4M3 codes.
        scales: (rows, width / 32) uint8 E8M0 bytes.
    """

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self._codes, self._scales = codes.view(torch.uint8), scales.view(torch.uint8)
        self._group = codes.shape[1] // scales.shape[1]

    def lookup(self, rows_TC: torch.Tensor) -> torch.Tensor:
        """See EngramTable."""
        values = decode_e4m3(self._codes[rows_TC]).unflatten(-1, (-1, self._group))
        widened: torch.Tensor = values * decode_e8m0(self._scales[rows_TC])[..., None]
        return widened.flatten(1)


class Engram:
    """Injection into all residual streams before a layer predicts its coefficients."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: Mapping[str, torch.Tensor],
        token_map_V: torch.Tensor,
        precision: Precision,
    ) -> None:
        text, prefix = config.text, f"layers.{layer}.engram."
        plan = EngramPlan.of(config).table_of(layer)
        device = token_map_V.device
        self.multipliers = torch.tensor(plan.multipliers, device=device)
        self.primes = torch.tensor(plan.primes, device=device)
        self.offsets = torch.tensor(plan.offsets, device=device)
        self.token_map_V, self.pad = token_map_V, int(token_map_V[text.engram_pad_token_id])
        self.image_token_id, self.eps, self.copies = config.image_token_id, text.rms_norm_eps, text.hc_mult
        self.dtype = precision.activation_dtype
        self.table: EngramTable = ResidentTable(
            weights[prefix + "embed.weight"], weights[prefix + "embed.scale"]
        )
        self.wkv = Linear(weights[prefix + "wkv.weight"], precision, quantized=True)
        self.q_weight, self.k_weight = (
            weights[prefix + "q_weight"].float(),
            weights[prefix + "k_weight"].float(),
        )

    def __call__(self, streams_TnD: torch.Tensor, rows: QueryRows, batch: ForwardBatch) -> torch.Tensor:
        """(T, n, hidden) -> the same with the gated memory added; image rows are unchanged."""
        table_rows_TC = self.address(batch.context_T4[rows.rows_T])
        memory_TE = self.table.lookup(table_rows_TC).to(self.dtype)
        kv = self.wkv(memory_TE).unflatten(-1, (self.copies + 1, -1))
        return engram_gate(
            streams_TnD, kv[:, :-1], kv[:, -1], self.q_weight, self.k_weight, self.eps, rows.is_image_T
        )

    def address(self, context_T4: torch.Tensor) -> torch.Tensor:
        """(T, 4) raw ids, own token first, -1 before the start -> (T, C) int64 table rows."""
        blocked_T4 = (context_T4 < 0) | (context_T4 == self.image_token_id)
        compressed_T4 = torch.where(blocked_T4, -1, self.token_map_V[context_T4.clamp_min(0)])
        return ngram_rows(compressed_T4, self.pad, self.multipliers, self.primes, self.offsets)
