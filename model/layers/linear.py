"""Linear layers over exactly dequantised weights."""

import torch
from epdserve.kernels.linear import linear
from epdserve.kernels.quant import round_fp8
from epdserve.model.precision import Precision


class Linear:
    """``y = W x`` with a float32 product and one rounding to the activation type.

    Args:
        weight_NK: (N, K) float32, the exact values of the stored weight.
        quantized: Whether the checkpoint stores it in FP8 or FP4, so that the input row is rounded to FP8 per 32
            values when the precision asks for it (spec/backbone 2.1).
    """

    def __init__(self, weight_NK: torch.Tensor, precision: Precision, *, quantized: bool) -> None:
        self.weight_NK = weight_NK
        self._dtype = precision.activation_dtype
        self._rounds_input = quantized and precision.quantizes_activations

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """(T, K) -> (T, N) in the activation type."""
        x = round_fp8(x_TK) if self._rounds_input else x_TK
        return linear(x.float(), self.weight_NK).to(self._dtype)
