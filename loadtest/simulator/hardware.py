"""How long steps take: a roofline of named GPUs that run the released architecture.

Peak rates are those of the vendor's data sheets (dense FP8, HBM). The shares of the peaks that serving reaches are
those implied by the throughput DeepSeek published for its own service ("DeepSeek-V3/R1 Inference System Overview",
2025): 73.7 k prompt tokens/s a node with 56 % of them cached and 37 G active parameters are 15 % of the FLOPs of eight
H800. Bytes and FLOPs of the model follow from its configuration (spec of layers, experts, 890 bytes of KV a token).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

KV_BYTES_PER_TOKEN: Final = 890.0
TAIL_BYTES: Final = 3e6
WINDOW: Final = 128

_LAYERS: Final = 40
_ENCODER_LAYERS: Final = 21
_EXPERTS, _ACTIVE_EXPERTS = 384, 6
_EXPERT_PARAMS: Final = 3 * 2304 * 5120
_ATTENTION_PARAMS: Final = 5120 * 1280 + 1280 * 32_768 + 5120 * 512 + 8192 * 4096 + 5120 * 8192
_HEAD_PARAMS: Final = 129_280 * 5120
_FP4_BYTES: Final = 0.5 + 1 / 32
_KEYS: Final = 512 + 128  # chosen entries and the window
_HEADS, _HEAD_DIM = 64, 512
_INDEX_FLOPS: Final = 2 * 32 * 128  # one query against one indexer key
_INDEX_BYTES: Final = 68
_MANY: Final = 128  # requests of a well filled decode worker


@dataclass(frozen=True, slots=True)
class Gpu:
    """Data sheet values: FP8 FLOP/s without sparsity, bytes/s and bytes of HBM."""

    name: str
    flops: float
    bytes_per_s: float
    memory_bytes: float


H200: Final = Gpu("H200", 1979e12, 4.8e12, 141e9)
B200: Final = Gpu("B200", 4500e12, 8.0e12, 180e9)
GPUS: Final = {gpu.name: gpu for gpu in (H200, B200)}


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of steps and bytes per second of links for one worker.

    Attributes:
        flops_share, bytes_share: What serving reaches of the peaks.
        fixed_s: Of every step: launches, sampling, scheduling.
        tier_bytes_per_s: Of pages (not used), host cache, SSD, peers.
    """

    gpu: Gpu = H200
    gpus: int = 4
    flops_share: float = 0.15
    bytes_share: float = 0.5
    fixed_s: float = 0.003
    tier_bytes_per_s: tuple[float, float, float, float] = (1.0, 20e9, 5e9, 20e9)
    same_machine_bytes_per_s: float = 50e9
    other_machine_bytes_per_s: float = 25e9
    link_latency_s: float = 0.003

    @property
    def _flops(self) -> float:
        return self.gpu.flops * self.gpus * self.flops_share

    @property
    def _bytes_per_s(self) -> float:
        return self.gpu.bytes_per_s * self.gpus * self.bytes_share

    @property
    def prefill_tokens_per_s(self) -> float:
        """Speed on short contexts."""
        return self._flops / _prefill_flops(0)

    @property
    def slot_s(self) -> float:
        """Seconds of a decode worker that one token of one request takes, among many."""
        return self.decode_s(_MANY, 0) / _MANY

    def prefill_s(self, tokens: float, context: float) -> float:
        """Seconds for a chunk of ``tokens`` whose last one stands at ``context``."""
        return self.fixed_s + tokens * _prefill_flops(context - tokens / 2) / self._flops

    def decode_s(self, requests: float, held_tokens: float) -> float:
        """Seconds of a decode step. Bytes and FLOPs do not overlap perfectly; their sum is the careful bound."""
        hit = 1 - math.exp(requests * math.log1p(-_ACTIVE_EXPERTS / _EXPERTS))
        weights = _LAYERS * (
            _ATTENTION_PARAMS + _EXPERT_PARAMS + hit * _EXPERTS * _EXPERT_PARAMS * _FP4_BYTES
        )
        kv = requests * _LAYERS * _KEYS * 288 + held_tokens * _INDEX_BYTES * 2.5
        flops = requests * (2 * (_LAYERS * _active_params() + _HEAD_PARAMS) + _LAYERS * _attention_flops())
        moved = weights + 2 * _HEAD_PARAMS + kv
        return self.fixed_s + moved / self._bytes_per_s + flops / self._flops


def _active_params() -> float:
    return _ATTENTION_PARAMS + (_ACTIVE_EXPERTS + 1) * _EXPERT_PARAMS


def _attention_flops() -> float:
    return 2 * _KEYS * _HEADS * 2 * _HEAD_DIM


def _prefill_flops(context: float) -> float:
    """Of one prompt token: the layers it runs, and the indexer's look at half as many entries in three layers."""
    return _ENCODER_LAYERS * (2 * _active_params() + _attention_flops()) + 3 * _INDEX_FLOPS * context / 2
