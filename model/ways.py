"""Which of the two ways a model computes; the only place that chooses (layers/arithmetic.py says what they are)."""

from collections.abc import Mapping

import torch
from epdserve.model.config import ModelConfig
from epdserve.model.layers.arithmetic import Arithmetic
from epdserve.model.layers.packed import PackedArithmetic
from epdserve.model.layers.wide import WideArithmetic
from epdserve.model.precision import Precision
from epdserve.model.weights import WeightForm


def weight_form(config: ModelConfig, precision: Precision, device: torch.device) -> WeightForm:
    """Form of the weights that suits a device: stored where the kernels can multiply with it, else wide.

    Kernels round rows to FP8 before FP8 and FP4 weights, which only ``native`` does; and they want shapes that fill a
    matrix instruction, which small models do not have.
    """
    native = precision is Precision.NATIVE and device.type == "cuda"
    return WeightForm.STORED if native and kernels_take(config) else WeightForm.WIDE


def kernels_take(config: ModelConfig) -> bool:
    """Whether the packed way has kernels for a model of these shapes."""
    text = config.text
    heads, keys = text.index_n_heads, text.index_head_dim
    return (
        text.hc_mult == 4
        and text.head_dim >= 64
        and all(size & (size - 1) == 0 for size in (text.head_dim, text.num_attention_heads, heads, keys))
        and heads >= 16
        and keys >= 32
        and text.o_lora_rank % 32 == 0
        and text.candidate_block_size & (text.candidate_block_size - 1) == 0
    )


def arithmetic_of(
    config: ModelConfig, tensors: Mapping[str, torch.Tensor], form: WeightForm, precision: Precision
) -> Arithmetic:
    """The arithmetic that weights of this form take.

    Raises:
        ValueError: Stored weights in another precision than ``native``.
    """
    if form is WeightForm.WIDE:
        return WideArithmetic(config, tensors, precision)
    if precision is not Precision.NATIVE:
        raise ValueError(
            f"stored weights multiply rows rounded to FP8: precision native, not {precision.value}"
        )
    return PackedArithmetic(config, tensors)
