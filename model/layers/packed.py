"""The packed way's products: weights as they are stored, multiplied by the kernels. Activations are bfloat16.

Rows are rounded to FP8 before weights that are stored in FP8 or FP4, as precision ``native`` asks. Nothing here waits
for the device: shapes follow from the number of rows alone.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from epdserve.kernels.linear import grouped_linear_fp8, linear_bf16, linear_fp8
from epdserve.kernels.moe import combine, expert_product, plan_experts, swiglu_quantize
from epdserve.kernels.quant import quantize_fp8
from epdserve.model.batch import ForwardBatch
from epdserve.model.config import ModelConfig
from epdserve.model.errors import WeightFileError
from epdserve.model.layers.packed_caches import PackedCaches
from epdserve.model.pools import KVPools


class Scaled(NamedTuple):
    """Codes and their UE8M0 scales: rows and weights in FP8 (32, 32 x 32 a scale), experts in FP4 (32 of a row)."""

    codes: torch.Tensor
    scales: torch.Tensor


class Fp8Linear:
    """A weight in FP8; its rows are rounded to FP8 unless they are FP8 already."""

    def __init__(self, weight: Scaled) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor | Scaled) -> torch.Tensor:
        """(T, K) -> (T, N) bfloat16."""
        rows = x if isinstance(x, Scaled) else Scaled(*quantize_fp8(x))
        return linear_fp8(*rows, *self.weight)


class Bf16Linear:
    """A weight in bfloat16."""

    def __init__(self, weight_NK: torch.Tensor, out_dtype: torch.dtype) -> None:
        self.weight_NK, self._out_dtype = weight_NK, out_dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(T, K) -> (T, N)."""
        return linear_bf16(x, self.weight_NK, out_dtype=self._out_dtype)


class GroupedFp8Linear:
    """An FP8 weight of its own for each group of channels; rows stay bfloat16."""

    def __init__(self, weight_GNK: Scaled) -> None:
        self.weight_GNK = weight_GNK

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(T, G, K) -> (T, G, N) bfloat16."""
        return grouped_linear_fp8(x, *self.weight_GNK)


class PackedTable:
    """Engram table; its rows are FP8 with a scale per 32, which is what the projection after it takes.

    Nothing is rounded again: a value and its scale give the product that rounding them anew would.
    """

    def __init__(self, table: Scaled) -> None:
        self._table = table

    def lookup(self, rows_TC: torch.Tensor) -> Scaled:
        """(T, C) -> C rows side by side."""
        return Scaled(self._table.codes[rows_TC].flatten(1), self._table.scales[rows_TC].flatten(1))


class PackedExperts:
    """Routed experts in MXFP4 with rows in FP8, sorted by expert on the device; the shared expert in FP8."""

    def __init__(
        self, w13: Scaled, w2: Scaled, shared13: Scaled, shared2: Scaled, *, limit: float, num_experts: int
    ) -> None:
        self._w13, self._w2, self._shared13, self._shared2 = w13, w2, shared13, shared2
        self._limit, self._experts = limit, num_experts

    def __call__(
        self, x_TD: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> torch.Tensor:
        """See ``arithmetic.Experts``."""
        plan = plan_experts(experts_Tk, self._experts)
        rows = quantize_fp8(x_TD)
        gate_up = expert_product(*rows, *self._w13, plan, gather=True)
        hidden = swiglu_quantize(gate_up, self._limit, plan, weights_Tk)
        routed = expert_product(*hidden, *self._w2, plan, gather=False)
        shared = linear_fp8(*rows, *self._shared13)
        return combine(routed, linear_fp8(*swiglu_quantize(shared, self._limit), *self._shared2), plan)


class PackedArithmetic:
    """See ``arithmetic.Arithmetic``. Weights are those of ``load_weights`` in the stored form."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
        self._config, self._weights = config, weights

    def tensor(self, name: str) -> torch.Tensor:
        """See Arithmetic."""
        return self._weights[name]

    def projection(
        self, *names: str, quantized: bool, out_dtype: torch.dtype | None = None
    ) -> Fp8Linear | Bf16Linear:
        """See Arithmetic.

        Raises:
            WeightFileError: A plain weight holds a value that bfloat16 does not.
        """
        if quantized:
            return Fp8Linear(self._fp8(*names))
        parts = [_bf16(name, self._weights[name]) for name in names]
        weight_NK = parts[0] if len(parts) == 1 else torch.cat(parts)
        return Bf16Linear(weight_NK, out_dtype or torch.bfloat16)

    def grouped_projection(self, name: str, groups: int) -> GroupedFp8Linear:
        """See Arithmetic."""
        return GroupedFp8Linear(Scaled(*(part.unflatten(0, (groups, -1)) for part in self._fp8(name))))

    def experts(self, prefix: str) -> PackedExperts:
        """See Arithmetic."""
        text, shared = self._config.text, prefix + "shared_experts."
        w13, w2 = (
            Scaled(self._weights[stack], self._weights[stack + "_scale"])
            for stack in (prefix + "experts.w13", prefix + "experts.w2")
        )
        return PackedExperts(
            w13,
            w2,
            self._fp8(shared + "w1.weight", shared + "w3.weight"),
            self._fp8(shared + "w2.weight"),
            limit=text.swiglu_limit,
            num_experts=text.n_routed_experts,
        )

    def memory(self, prefix: str) -> PackedTable:
        """See Arithmetic."""
        return PackedTable(self._fp8(prefix + "embed.weight"))

    def caches(self, batch: ForwardBatch, pools: KVPools) -> PackedCaches:
        """See Arithmetic."""
        return PackedCaches(self._config, batch, pools)

    def _fp8(self, *names: str) -> Scaled:
        """Weights below one another; all but the last have whole blocks of 32 rows."""
        codes = [self._weights[name] for name in names]
        scales = [self._weights[name.removesuffix("weight") + "scale"] for name in names]
        return Scaled(codes[0], scales[0]) if len(names) == 1 else Scaled(torch.cat(codes), torch.cat(scales))


def _bf16(name: str, tensor: torch.Tensor) -> torch.Tensor:
    narrow = tensor.bfloat16()
    if not torch.equal(narrow.to(tensor.dtype), tensor):
        raise WeightFileError(f"{name}: bfloat16 does not hold its values")
    return narrow
