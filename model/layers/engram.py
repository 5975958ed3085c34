"""Engram: conditional memory addressed by n-grams of the input (spec/modules 1)."""

import torch
from epdserve.kernels.engram import engram_gate, ngram_rows
from epdserve.model.batch import ForwardBatch, QueryRows
from epdserve.model.config import ModelConfig
from epdserve.model.engram_plan import EngramPlan
from epdserve.model.layers.arithmetic import Arithmetic


class Engram:
    """Injection into all residual streams before a layer predicts its coefficients."""

    def __init__(self, config: ModelConfig, layer: int, math: Arithmetic, token_map_V: torch.Tensor) -> None:
        text, prefix = config.text, f"layers.{layer}.engram."
        plan = EngramPlan.of(config).table_of(layer)
        device = token_map_V.device
        self.multipliers = torch.tensor(plan.multipliers, device=device)
        self.primes = torch.tensor(plan.primes, device=device)
        self.offsets = torch.tensor(plan.offsets, device=device)
        self.token_map_V, self.pad = token_map_V, int(token_map_V[text.engram_pad_token_id])
        self.image_token_id, self.eps, self.copies = config.image_token_id, text.rms_norm_eps, text.hc_mult
        self.table = math.memory(prefix)
        self.wkv = math.projection(prefix + "wkv.weight", quantized=True)
        self.q_weight = math.tensor(prefix + "q_weight").float()
        self.k_weight = math.tensor(prefix + "k_weight").float()

    def __call__(self, streams_TnD: torch.Tensor, rows: QueryRows, batch: ForwardBatch) -> torch.Tensor:
        """(T, n, hidden) -> the same with the gated memory added; image rows are unchanged."""
        memory = self.table.lookup(self.address(batch.context_T4[rows.rows_T]))
        kv = self.wkv(memory).unflatten(-1, (self.copies + 1, -1))
        return engram_gate(
            streams_TnD, kv[:, :-1], kv[:, -1], self.q_weight, self.k_weight, self.eps, rows.is_image_T
        )

    def address(self, context_T4: torch.Tensor) -> torch.Tensor:
        """(T, 4) raw ids, own token first, -1 before the start -> (T, C) int64 table rows."""
        blocked_T4 = (context_T4 < 0) | (context_T4 == self.image_token_id)
        compressed_T4 = torch.where(blocked_T4, -1, self.token_map_V[context_T4.clamp_min(0)])
        return ngram_rows(compressed_T4, self.pad, self.multipliers, self.primes, self.offsets)
