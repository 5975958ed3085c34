"""The published ``config.json``, with its own names, validated and frozen.

Every instance is consistent: what the layers, the KV layout and the replay rely on is checked here once
(``config_checks``), so no other file has to ask again. Keys this server does not use are ignored.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from epdserve.model.config_checks import find_problems
from epdserve.model.errors import ConfigError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

CONFIG_FILE: Final = "config.json"

Count = Annotated[int, Field(strict=True, gt=0)]
Index = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _square_32(size: tuple[int, int]) -> tuple[int, int]:
    if size != (32, 32):
        raise ValueError(f"must be [32, 32], got {list(size)}")
    return size


class _InconsistentError(ValueError):
    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=(), populate_by_name=True)


class RopeScaling(_Section):
    """YaRN of the compressed layers (spec 3.1); window-only layers never use it."""

    rope_type: Literal["yarn"]
    factor: Positive
    beta_fast: Positive
    beta_slow: Positive
    original_max_position_embeddings: Count


class QuantizationConfig(_Section):
    """Storage of the checkpoint: FP8 in 32x32 blocks, routed experts in MXFP4 (spec 1.2)."""

    quant_method: Literal["fp8"]
    activation_scheme: Literal["dynamic"]
    weight_block_size: Annotated[tuple[int, int], AfterValidator(_square_32)]
    scale_fmt: Literal["ue8m0"]
    expert_dtype: Literal["fp4"]


class VisionConfig(_Section):
    """The vision encoder (modules 3). Sizes in pixels where the name says so, else in elements."""

    model_type: Literal["deepseek_v41_vision"]
    num_hidden_layers: Count
    hidden_size: Count
    num_attention_heads: Count
    intermediate_size: Count
    patch_size: Count
    rope_theta: Positive
    downsample_ratio: Count
    max_image_tokens: Count
    min_pixels: Count
    max_wh_ratio: Positive | None = None


class TextConfig(_Section):
    """The language backbone (spec 1.1). Layer ids count from 0; lengths are tokens unless named otherwise."""

    model_type: Literal["deepseek_v41_text"]
    vocab_size: Count
    hidden_size: Count
    num_hidden_layers: Count
    hidden_act: Literal["silu"]
    swiglu_limit: Positive
    rms_norm_eps: Positive
    max_position_embeddings: Count
    tie_word_embeddings: Literal[False] = False

    num_attention_heads: Count
    num_key_value_heads: Literal[1]
    head_dim: Count
    qk_rope_head_dim: Count
    q_lora_rank: Count
    o_lora_rank: Count
    o_groups: Count
    attention_bias: Literal[False]
    sliding_window: Count
    rope_theta: Positive
    compress_rope_theta: Positive
    rope_scaling: RopeScaling

    # One ratio per layer: 0 window only, else tokens per entry of the cache the layer reads. Entries past the
    # last layer belong to the drafter.
    compress_ratios: tuple[Literal[0, 1, 2], ...]
    kv_source_layer_ids: Annotated[tuple[Index, ...], Field(min_length=1)]
    index_source_layer_ids: Annotated[tuple[Index, ...], Field(min_length=1)]
    index_n_heads: Count
    index_head_dim: Count
    index_topk: Count
    candidate_source_layer_id: Index
    candidate_topk_blocks: Count
    candidate_block_size: Count

    n_routed_experts: Count
    n_shared_experts: Literal[1]
    num_experts_per_tok: Count
    moe_intermediate_size: Count
    scoring_func: Literal["sqrtsoftplus"]
    topk_method: Literal["noaux_tc"]
    norm_topk_prob: Literal[True]
    routed_scaling_factor: Positive

    hc_mult: Count
    hc_sinkhorn_iters: Count
    hc_eps: Positive

    engram_layer_ids: tuple[Index, ...]
    engram_num_embeddings: tuple[Count, ...]
    engram_max_ngram_size: Literal[4]
    engram_vocab_size: Count
    engram_n_heads: Count
    engram_head_dim: Count
    engram_pad_token_id: Index
    engram_compressed_vocab_size: Count

    num_nextn_predict_layers: Index = 0
    dspark_block_size: Count | None = None
    dspark_noise_token_id: Index | None = None
    dspark_target_layer_ids: tuple[Index, ...] = ()
    dspark_markov_rank: Count | None = None
    dspark_n_routed_experts: Count | None = None
    dspark_num_experts_per_tok: Count | None = None


class ModelConfig(_Section):
    """A model this server can run: ``text``, ``quantization`` and, for image input, ``vision``."""

    model_type: Literal["deepseek_v41"]
    dtype: Literal["bfloat16"]
    bos_token_id: Index
    eos_token_id: Index
    pad_token_id: Index
    image_token_id: Index
    text: TextConfig = Field(alias="text_config")
    quantization: QuantizationConfig = Field(alias="quantization_config")
    vision: VisionConfig | None = Field(default=None, alias="vision_config")

    @model_validator(mode="after")
    def _is_consistent(self) -> "ModelConfig":
        if problems := find_problems(self):
            raise _InconsistentError(problems)
        return self

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "ModelConfig":
        """Validate a parsed ``config.json``.

        Raises:
            ConfigError: With every problem of types and ranges, or, if there are none, of consistency.
        """
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            raise ConfigError(CONFIG_FILE, _describe(error)) from None

    @classmethod
    def from_directory(cls, directory: str | Path) -> "ModelConfig":
        """Read ``config.json`` of a model directory.

        Raises:
            ConfigError: If the file is absent, no JSON object, or fails ``from_json``.
        """
        path = Path(directory) / CONFIG_FILE
        try:
            document = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(str(path), [str(error)]) from None
        if not isinstance(document, dict):
            raise ConfigError(str(path), [f"must hold a JSON object, got {type(document).__name__}"])
        return cls.from_json(document)


def _describe(error: ValidationError) -> list[str]:
    lines: list[str] = []
    for item in error.errors():
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, _InconsistentError):
            lines.extend(cause.problems)
        else:
            where = ".".join(str(part) for part in item["loc"]) or "document"
            lines.append(f"{where}: {item['msg']} (got {str(item.get('input'))[:60]})")
    return lines
