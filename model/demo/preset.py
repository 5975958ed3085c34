"""Shapes and initial scales of the demo model: the only file to edit for another size.

Eight layers with every mechanism of the released model: windows (0, 1), Full at ratio 2 (2, 3), Full with candidate
pool, Reuse and Reindex at ratio 1 (4-7), Engram before layers 1 and 4, routed and shared experts, two residual
copies, YaRN. Prompts longer than 32, 64 and 256 tokens exceed window, top-k and candidate pool.
A vision encoder of two blocks that takes images of the published sizes.
"""

from dataclasses import dataclass
from typing import Any, Final

VOCAB_SIZE: Final = 4096
DEMO_KEY: Final = "epdserve_demo_model"  # in config.json: marks a directory that may be written again
DEMO_VERSION: Final = 2


@dataclass(frozen=True, slots=True)
class InitialScales:
    """Standard deviations and constants of the random weights.

    Matrices have 1 / sqrt(fan-in); what writes into the residual streams is damped by 1 / sqrt(2 * layers).
    """

    embedding: float = 0.5
    engram_rows: float = 0.5
    logits: float = 1.5  # of the next-token logits before softmax
    gain_spread: float = 0.1  # norm weights and Engram gains around 1
    sink: float = 0.5
    router_bias: float = 0.1
    hyper_scale: float = 0.3  # weight of the token-dependent part of the residual mixing
    hyper_pull: float = 2.0  # fixed part: how strongly each copy is kept to itself and read in turn
    ending_gain: float = 1.6  # louder rows for end of thinking and end of answer, so that answers end


SCALES: Final = InitialScales()

_TEXT: Final[dict[str, Any]] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 64,
    "o_groups": 2,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "max_position_embeddings": 32768,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 2048,
    },
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 32,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1],
    "compress_rope_theta": 160000,
    "kv_source_layer_ids": [2, 3, 4],
    "index_source_layer_ids": [2, 3, 4, 6],
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 64,
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 32,
    "candidate_block_size": 8,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 4],
    "engram_num_embeddings": [9210, 9456],  # sums of the primes from 1500 on; the writer checks them
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 1500,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 2432,  # follows from the tokenizer; the writer checks it
    "num_nextn_predict_layers": 0,
}

# A small tower with the published sizes of images: spans are as long as those of the released model.
_VISION: Final[dict[str, Any]] = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "patch_size": 14,
    "rope_theta": 10000,
    "downsample_ratio": 3,
    "max_image_tokens": 1024,
    "min_pixels": 295936,
    "max_wh_ratio": None,
}

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 4086,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
    "text_config": _TEXT,
    "vision_config": _VISION,
}


def config_document(seed: int) -> dict[str, Any]:
    """The ``config.json`` of the demo model, in the published schema, marked with how it was made."""
    return {**CONFIG, DEMO_KEY: {"version": DEMO_VERSION, "seed": seed}}


def trained_document() -> dict[str, Any]:
    """The ``config.json`` of the demo model with the trained weights."""
    return {**CONFIG, DEMO_KEY: {"version": DEMO_VERSION, "weights": "trained"}}
