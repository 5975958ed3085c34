"""What must hold between the numbers of a config. Each check yields sentences; none of them raises."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epdserve.model.config import ModelConfig, TextConfig

QUANT_GROUP = 32  # FP8 and MXFP4 scales cover 32 columns; the main KV's groups of 16 then fit as well


def find_problems(config: "ModelConfig") -> list[str]:
    """Every inconsistency of a config whose single fields are valid; empty if it can be served."""
    text = config.text
    problems = [
        *_token_ids(config),
        *_vision(config),
        *_dimensions(text),
        *_experts(text),
        *_rope(text),
        *_engram(text),
    ]
    layers = list(_layer_lists(text))
    problems += layers
    if not layers:  # the roles are only meaningful on well-formed lists
        problems += [*_sources(text), *_candidates(text)]
    return problems


def _token_ids(config: "ModelConfig") -> Iterator[str]:
    ids = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "image_token_id": config.image_token_id,
        "engram_pad_token_id": config.text.engram_pad_token_id,
    }
    for name, token in ids.items():
        if token >= config.text.vocab_size:
            yield f"{name}={token} is outside the vocabulary of {config.text.vocab_size}"


def _vision(config: "ModelConfig") -> Iterator[str]:
    vision = config.vision
    if vision is None:
        return
    if (
        vision.hidden_size % vision.num_attention_heads
        or vision.hidden_size // vision.num_attention_heads % 4
    ):
        yield (
            f"vision: {vision.num_attention_heads} heads of hidden_size={vision.hidden_size} must each have a "
            "multiple of 4 channels"
        )
    if vision.max_image_tokens < 4:
        yield f"vision: max_image_tokens={vision.max_image_tokens} holds no image"


def _dimensions(text: "TextConfig") -> Iterator[str]:
    widths = {
        "hidden_size": text.hidden_size,
        "moe_intermediate_size": text.moe_intermediate_size,
        "q_lora_rank": text.q_lora_rank,
        "head_dim": text.head_dim,
        "index_head_dim": text.index_head_dim,
        "engram_head_dim": text.engram_head_dim,
        "o_groups * o_lora_rank": text.o_groups * text.o_lora_rank,
    }
    for name, width in widths.items():
        if width % QUANT_GROUP:
            yield f"{name}={width} must be a multiple of {QUANT_GROUP}, the quantisation group"
    if text.num_attention_heads % text.o_groups:
        yield f"num_attention_heads={text.num_attention_heads} must be a multiple of o_groups={text.o_groups}"


def _experts(text: "TextConfig") -> Iterator[str]:
    if text.num_experts_per_tok > text.n_routed_experts:
        yield f"num_experts_per_tok={text.num_experts_per_tok} exceeds the {text.n_routed_experts} experts"


def _rope(text: "TextConfig") -> Iterator[str]:
    if text.qk_rope_head_dim % 2:
        yield f"qk_rope_head_dim={text.qk_rope_head_dim} must be even, it is rotated in pairs"
    for name, width in {"head_dim": text.head_dim, "index_head_dim": text.index_head_dim}.items():
        if text.qk_rope_head_dim > width:
            yield f"qk_rope_head_dim={text.qk_rope_head_dim} exceeds {name}={width}"
    yarn = text.rope_scaling
    if yarn.factor < 1:
        yield f"rope_scaling.factor={yarn.factor} must be at least 1"
    if yarn.beta_fast <= yarn.beta_slow:
        yield f"rope_scaling.beta_fast={yarn.beta_fast} must exceed beta_slow={yarn.beta_slow}"


def _engram(text: "TextConfig") -> Iterator[str]:
    layers, tables = len(text.engram_layer_ids), len(text.engram_num_embeddings)
    if layers != tables:
        yield f"engram_layer_ids names {layers} layers, engram_num_embeddings {tables} tables"
    classes, ids = text.engram_compressed_vocab_size, text.vocab_size
    if classes > ids:
        yield f"engram_compressed_vocab_size={classes} exceeds vocab_size={ids}"


def _layer_lists(text: "TextConfig") -> Iterator[str]:
    layers = text.num_hidden_layers
    if len(text.compress_ratios) < layers:
        yield f"compress_ratios has {len(text.compress_ratios)} entries for {layers} layers"
    lists = {
        "kv_source_layer_ids": text.kv_source_layer_ids,
        "index_source_layer_ids": text.index_source_layer_ids,
        "engram_layer_ids": text.engram_layer_ids,
        "dspark_target_layer_ids": text.dspark_target_layer_ids,
        "candidate_source_layer_id": (text.candidate_source_layer_id,),
    }
    for name, ids in lists.items():
        if any(layer >= layers for layer in ids):
            yield f"{name}={list(ids)} names a layer past the last, {layers - 1}"
        if any(later <= earlier for earlier, later in pairwise(ids)):
            yield f"{name}={list(ids)} must be strictly ascending"


def _sources(text: "TextConfig") -> Iterator[str]:
    if missing := set(text.kv_source_layer_ids) - set(text.index_source_layer_ids):
        # Such a layer would read picks that another cache's entries were scored for.
        yield f"kv_source_layer_ids {sorted(missing)} must also be in index_source_layer_ids"
    for layer, ratio in enumerate(text.compress_ratios[: text.num_hidden_layers]):
        if ratio == 0:
            if layer in text.index_source_layer_ids:
                yield f"layer {layer} is an index source but has compress_ratio 0"
            continue
        source = last_at_or_before(text.kv_source_layer_ids, layer)
        if source is None:
            yield f"layer {layer} has compress_ratio {ratio} but no KV source at or before it"
        elif text.compress_ratios[source] != ratio:
            yield (
                f"layer {layer} has compress_ratio {ratio}, "
                f"its KV source {source} has {text.compress_ratios[source]}"
            )


def _candidates(text: "TextConfig") -> Iterator[str]:
    source = text.candidate_source_layer_id
    if source not in text.kv_source_layer_ids:
        yield f"candidate_source_layer_id={source} must be a KV source"
    for layer in text.index_source_layer_ids:
        owner = last_at_or_before(text.kv_source_layer_ids, layer)
        if layer not in text.kv_source_layer_ids and owner != source:
            yield f"layer {layer} re-indexes the cache of {owner}, candidates exist for {source} only"
    pool = text.candidate_topk_blocks * text.candidate_block_size - (text.candidate_block_size - 1)
    if pool < text.index_topk:
        # The newest block may hold one visible entry; a smaller pool lets entries outside it fill the picks.
        yield (
            f"candidate_topk_blocks={text.candidate_topk_blocks} of {text.candidate_block_size} entries "
            f"guarantee {pool} candidates, index_topk={text.index_topk} needs more"
        )


def last_at_or_before(sources: Sequence[int], layer: int) -> int | None:
    """The largest id of ``sources`` that is at most ``layer``: whose cache or picks the layer reads."""
    return max((source for source in sources if source <= layer), default=None)
