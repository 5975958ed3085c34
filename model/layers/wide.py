"""The wide way's products: exactly dequantised weights in float32, on any device and in every precision."""

from collections.abc import Mapping

import torch
from epdserve.kernels.linear import grouped_linear, linear
from epdserve.kernels.moe import swiglu
from epdserve.kernels.quant import decode_e4m3, decode_e8m0, round_fp8
from epdserve.model.batch import ForwardBatch
from epdserve.model.config import ModelConfig
from epdserve.model.entry_codec import entry_codec
from epdserve.model.layers.wide_caches import WideCaches
from epdserve.model.pools import KVPools
from epdserve.model.precision import Precision


class Linear:
    """``y = W x`` with a float32 product and one rounding to the activation type.

    Args:
        weight_NK: (N, K) float32, the exact values of the stored weight.
        quantized: Whether the checkpoint stores it in FP8 or FP4, so that the input row is rounded to FP8 per 32
            values when the precision asks for it (spec/backbone 2.1).
    """

    def __init__(
        self,
        weight_NK: torch.Tensor,
        precision: Precision,
        *,
        quantized: bool,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self.weight_NK = weight_NK
        self._dtype = out_dtype or precision.activation_dtype
        self._rounds_input = quantized and precision.quantizes_activations

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(T, K) -> (T, N)."""
        rounded = round_fp8(x) if self._rounds_input else x
        return linear(rounded.float(), self.weight_NK).to(self._dtype)


class GroupedLinear:
    """A weight of its own for each group of channels."""

    def __init__(self, weight_GNK: torch.Tensor, precision: Precision) -> None:
        self.weight_GNK, self._dtype = weight_GNK, precision.activation_dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(T, G, K) -> (T, G, N)."""
        return grouped_linear(x.float(), self.weight_GNK).to(self._dtype)


class WideTable:
    """Engram table in storage form; rows are widened when they are read.

    Args:
        codes: (rows, width) uint8 E4M3 codes.
        scales: (rows, width / 32) uint8 E8M0 bytes.
    """

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, precision: Precision) -> None:
        self._codes, self._scales = codes.view(torch.uint8), scales.view(torch.uint8)
        self._group, self._dtype = codes.shape[1] // scales.shape[1], precision.activation_dtype

    def lookup(self, rows_TC: torch.Tensor) -> torch.Tensor:
        """(T, C) -> (T, C * width); the values are exact in bfloat16."""
        values = decode_e4m3(self._codes[rows_TC]).unflatten(-1, (-1, self._group))
        widened: torch.Tensor = values * decode_e8m0(self._scales[rows_TC])[..., None]
        return widened.flatten(1).to(self._dtype)


class WideExperts:
    """Routed experts as one grouped product over rows that are padded to the largest group."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, torch.Tensor], prefix: str, precision: Precision
    ) -> None:
        self.limit, self.dtype = config.text.swiglu_limit, precision.activation_dtype
        self.rounds = precision.quantizes_activations
        # Gate and up are one product: (E, 2 * inter, hidden).
        self.w13_ENK = torch.cat([weights[prefix + "experts.w1"], weights[prefix + "experts.w3"]], dim=1)
        self.w2_EKN = weights[prefix + "experts.w2"]
        self.experts_E = torch.arange(len(self.w13_ENK), device=self.w13_ENK.device)
        shared = prefix + "shared_experts."
        shared_w13 = torch.cat([weights[shared + "w1.weight"], weights[shared + "w3.weight"]])
        self.shared_w13 = Linear(shared_w13, precision, quantized=True)
        self.shared_w2 = Linear(weights[shared + "w2.weight"], precision, quantized=True)

    def __call__(
        self, x_TD: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> torch.Tensor:
        """See ``arithmetic.Experts``."""
        routed_TD = self.routed(x_TD, experts_Tk, weights_Tk)
        gate, up = self.shared_w13(x_TD).chunk(2, dim=-1)
        shared_TD = self.shared_w2(swiglu(gate.float(), up.float(), self.limit).to(self.dtype))
        return (routed_TD + shared_TD.float()).to(self.dtype)

    def routed(self, x_TD: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor) -> torch.Tensor:
        """Float32 sum over choices. Rows lie as (place within the expert, expert): all experts are one product."""
        num_experts, top_k = len(self.w13_ENK), experts_Tk.shape[1]
        expert_P = experts_Tk.flatten()
        seen_PE = (expert_P[:, None] == self.experts_E).cumsum(0)
        where_P = (seen_PE.gather(1, expert_P[:, None]).flatten() - 1) * num_experts + expert_P
        capacity = int(seen_PE[-1].max())  # the shapes need this number: on a device it waits
        x = (round_fp8(x_TD) if self.rounds else x_TD).float()
        x_CED = x.new_zeros(capacity * num_experts, x.shape[1])
        x_CED = x_CED.index_copy_(0, where_P, x.repeat_interleave(top_k, dim=0)).view(
            capacity, num_experts, -1
        )
        weight_CE1 = x.new_zeros(capacity * num_experts).index_copy_(0, where_P, weights_Tk.flatten())
        weight_CE1 = weight_CE1.view(capacity, num_experts, 1)
        gate, up = grouped_linear(x_CED, self.w13_ENK).to(self.dtype).float().chunk(2, dim=-1)
        # The routing weight comes before w2, so that it takes part in the second rounding (spec/backbone 6).
        hidden = (swiglu(gate, up, self.limit) * weight_CE1).to(self.dtype)
        hidden = round_fp8(hidden) if self.rounds else hidden
        out_CED = grouped_linear(hidden.float(), self.w2_EKN).to(self.dtype).float()
        routed_TD: torch.Tensor = (
            out_CED.flatten(0, 1).index_select(0, where_P).view(-1, top_k, x.shape[1]).sum(1)
        )
        return routed_TD


class WideArithmetic:
    """See ``arithmetic.Arithmetic``. Weights are those of ``load_weights`` in the wide form."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, torch.Tensor], precision: Precision
    ) -> None:
        self._config, self._weights, self._precision = config, weights, precision

    def tensor(self, name: str) -> torch.Tensor:
        """See Arithmetic."""
        return self._weights[name]

    def projection(self, *names: str, quantized: bool, out_dtype: torch.dtype | None = None) -> Linear:
        """See Arithmetic."""
        parts = [self._weights[name].float() for name in names]
        weight_NK = parts[0] if len(parts) == 1 else torch.cat(parts)
        return Linear(weight_NK, self._precision, quantized=quantized, out_dtype=out_dtype)

    def grouped_projection(self, name: str, groups: int) -> GroupedLinear:
        """See Arithmetic."""
        return GroupedLinear(self._weights[name].unflatten(0, (groups, -1)), self._precision)

    def experts(self, prefix: str) -> WideExperts:
        """See Arithmetic."""
        return WideExperts(self._config, self._weights, prefix, self._precision)

    def memory(self, prefix: str) -> WideTable:
        """See Arithmetic."""
        codes, scales = self._weights[prefix + "embed.weight"], self._weights[prefix + "embed.scale"]
        return WideTable(codes, scales, self._precision)

    def caches(self, batch: ForwardBatch, pools: KVPools) -> WideCaches:
        """See Arithmetic."""
        return WideCaches(self._config, batch, pools, entry_codec(pools.layout.entry_format))
