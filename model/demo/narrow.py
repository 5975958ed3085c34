"""A model with the released layer plan, window and cuts but few channels: for measurements that need 20 + 20 layers.

Random weights and no tokenizer: it computes, and has nothing to say.
"""

import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from epdserve.model.backbone import Backbone
from epdserve.model.checkpoint import SINGLE_FILE
from epdserve.model.config import ModelConfig
from epdserve.model.demo.preset import CONFIG
from epdserve.model.demo.weights import demo_tensors
from epdserve.model.precision import Precision
from epdserve.model.weights import load_weights
from safetensors.torch import save_file

_CHANGES: Final[dict[str, Any]] = {
    "num_hidden_layers": 40,
    "compress_ratios": [0, 0, *[2] * 18, *[1] * 20],
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "candidate_source_layer_id": 20,
    "engram_layer_ids": [1, 14],
    "sliding_window": 128,
    "index_topk": 128,
    "candidate_topk_blocks": 512,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "head_dim": 32,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 1,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "vocab_size": 512,
    "engram_compressed_vocab_size": 512,
}


def narrow_config() -> ModelConfig:
    """Shapes of the narrow model."""
    text = {**CONFIG["text_config"], **_CHANGES}
    document = {**CONFIG, "text_config": text, "vision_config": None, "image_token_id": 511}
    return ModelConfig.model_validate(document)


def narrow_backbone(precision: Precision = Precision.F32Q, *, seed: int = 1) -> Backbone:
    """The narrow model with random weights, the same ones for every seed."""
    config = narrow_config()
    with tempfile.TemporaryDirectory() as folder:
        save_file(demo_tensors(config, seed=seed, silent_ids=(), ending_ids=()), Path(folder, SINGLE_FILE))
        weights = load_weights(folder, config, "cpu")
    return Backbone(config, weights, torch.arange(config.text.vocab_size), precision)
