"""Narrow number formats: FP8 and FP4 with group scales, for caches, activations and weights."""

from epdserve.kernels.dispatch import on_device, on_host
from epdserve.kernels.quant import reference as _reference

decode_e2m1 = _reference.decode_e2m1_ref
decode_e4m3 = _reference.decode_e4m3_ref
decode_e8m0 = _reference.decode_e8m0_ref
dequantize_fp4_e4m3 = on_host(_reference.dequantize_fp4_e4m3_ref)
dequantize_fp4_e8m0 = on_host(_reference.dequantize_fp4_e8m0_ref)
dequantize_fp8 = on_host(_reference.dequantize_fp8_ref)
dequantize_fp8_blocks = _reference.dequantize_fp8_blocks_ref
dequantize_mxfp4 = _reference.dequantize_mxfp4_ref
quantize_fp4_e4m3 = _reference.quantize_fp4_e4m3_ref
quantize_fp4_e8m0 = on_device(_reference.quantize_fp4_e8m0_ref, "quant.rows:quantize_fp4_e8m0")
quantize_fp8 = on_device(_reference.quantize_fp8_ref, "quant.rows:quantize_fp8")
quantize_fp8_blocks = _reference.quantize_fp8_blocks_ref
quantize_mxfp4 = _reference.quantize_mxfp4_ref
round_fp4_e4m3 = _reference.round_fp4_e4m3_ref
round_fp4_e8m0 = _reference.round_fp4_e8m0_ref
round_fp8 = _reference.round_fp8_ref

__all__ = [
    "decode_e2m1",
    "decode_e4m3",
    "decode_e8m0",
    "dequantize_fp4_e4m3",
    "dequantize_fp4_e8m0",
    "dequantize_fp8",
    "dequantize_fp8_blocks",
    "dequantize_mxfp4",
    "quantize_fp4_e4m3",
    "quantize_fp4_e8m0",
    "quantize_fp8",
    "quantize_fp8_blocks",
    "quantize_mxfp4",
    "round_fp4_e4m3",
    "round_fp4_e8m0",
    "round_fp8",
]
