"""What holds for every family."""

import importlib
import inspect

import pytest

FAMILIES = {
    "attention": ["sink_attention", "sparse_attention"],
    "cache_ops": ["gather_rows", "scatter_rows", "write_index_k", "write_main_kv", "write_window_kv"],
    "checksum": [
        "HOST_CHECKSUM_KERNEL",
        "HostChecksum",
        "checksum_weights",
        "host_checksum",
        "page_checksums",
        "page_checksums_host",
        "page_checksums_numpy",
    ],
    "compress": ["pool_entries", "pool_pairs"],
    "engram": ["engram_gate", "ngram_rows"],
    "indexer": [
        "candidate_blocks",
        "candidate_mask",
        "entries_of_slots",
        "score_blocks",
        "score_entries",
        "score_pages",
        "top_entries",
    ],
    "linear": ["grouped_linear", "grouped_linear_fp8", "linear", "linear_bf16", "linear_fp8"],
    "mhc": [
        "advance",
        "coefficients_from_mixes",
        "collapse",
        "expand",
        "hyper_coefficients",
        "sinkhorn",
    ],
    "moe": ["combine", "expert_product", "plan_experts", "route", "swiglu", "swiglu_quantize"],
    "norm": ["rms_norm"],
    "quant": [
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
    ],
    "rope": [
        "YarnScaling",
        "apply_rope",
        "apply_rope_in_place",
        "apply_rope_inverse",
        "rope_frequencies",
        "rotations",
    ],
    "sampling": [
        "accept_greedy",
        "add_bias",
        "filtered_probs",
        "forbid",
        "log_probs",
        "penalize",
        "sample",
        "top_log_probs",
        "verify_drafts",
    ],
}

DISPATCHED = {"checksum"}  # families with a dispatch.py


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_exports_the_agreed_names(family: str) -> None:
    module = importlib.import_module(f"epdserve.kernels.{family}")
    assert sorted(module.__all__) == sorted(FAMILIES[family])
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_name_is_dispatched_or_the_reference_of_the_same_name(family: str) -> None:
    module = importlib.import_module(f"epdserve.kernels.{family}")
    reference = importlib.import_module(f"epdserve.kernels.{family}.reference")
    dispatched = (
        vars(importlib.import_module(f"epdserve.kernels.{family}.dispatch")) if family in DISPATCHED else {}
    )
    for name in set(module.__all__) - set(dispatched):
        if hasattr(reference, f"{name}_ref"):
            assert inspect.unwrap(getattr(module, name)) is getattr(reference, f"{name}_ref")
