"""Which tensors a config asks for: official names, shapes and storage dtypes (spec 1.2)."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from epdserve.model.config import ModelConfig
from epdserve.model.config_checks import QUANT_GROUP
from epdserve.model.layer_plan import LayerPlan, LayerSpec

# Parts of the published checkpoint that the text backbone does not need: drafter and vision encoder.
IGNORED_PREFIXES: Final = ("mtp.", "vision.", "aligner.", "image_")


class Storage(Enum):
    """How a tensor lies in the file, and so how it becomes numbers."""

    PLAIN = "plain"  # BF16 or F32, taken as it is
    FP8 = "fp8"  # E4M3, one E8M0 scale per block of 32 x 32
    MXFP4 = "mxfp4"  # two E2M1 codes a byte, low nibble first, one E8M0 scale per row and 32 columns
    TABLE = "table"  # E4M3 rows, one E8M0 scale per 32 columns; stays as stored, rows are decoded when read
    SCALE = "scale"  # the scales of the tensor named by ``scale_of``


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as it must stand in the files; ``dtypes`` uses the names of the safetensors format."""

    shape: tuple[int, ...]
    dtypes: frozenset[str]
    storage: Storage
    scale_of: str | None = None


_Named = tuple[str, TensorSpec]
_NUMBERS: Final = frozenset({"BF16", "F32"})


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the text backbone, by official name, in layer order."""
    text = config.text
    specs = dict(_plain("embed.weight", text.vocab_size, text.hidden_size))
    for layer in LayerPlan.of(config).layers:
        specs.update(_layer(config, layer))
    specs.update(_plain("norm.weight", text.hidden_size))
    specs.update(_plain("head.weight", text.vocab_size, text.hidden_size))
    return specs


def _layer(config: ModelConfig, layer: LayerSpec) -> Iterator[_Named]:
    prefix = f"layers.{layer.index}."
    hidden = config.text.hidden_size
    yield from _plain(prefix + "attn_norm.weight", hidden)
    yield from _plain(prefix + "ffn_norm.weight", hidden)
    yield from _attention(config, prefix + "attn.")
    yield from _hyper_connections(config, prefix)
    yield from _experts(config, prefix + "ffn.")
    if layer.writes_cache:
        yield from _compressor(config, prefix + "attn.", layer)
    if layer.scores_entries:
        yield from _index_queries(config, prefix + "attn.indexer.")
    if layer.engram:
        yield from _engram(config, prefix + "engram.", layer.index)


def _attention(config: ModelConfig, prefix: str) -> Iterator[_Named]:
    text = config.text
    latent, heads = text.head_dim, text.num_attention_heads
    yield from _fp8(prefix + "wq_a", text.q_lora_rank, text.hidden_size)
    yield from _plain(prefix + "q_norm.weight", text.q_lora_rank)
    yield from _fp8(prefix + "wq_b", heads * latent, text.q_lora_rank)
    yield from _fp8(prefix + "wkv", latent, text.hidden_size)
    yield from _plain(prefix + "kv_norm.weight", latent)
    yield from _float32(prefix + "attn_sink", heads)
    # Groups of heads share one projection each; the groups stand below one another.
    grouped = text.o_groups * text.o_lora_rank
    yield from _fp8(prefix + "wo_a", grouped, heads // text.o_groups * latent)
    yield from _fp8(prefix + "wo_b", text.hidden_size, grouped)


def _hyper_connections(config: ModelConfig, prefix: str) -> Iterator[_Named]:
    copies = config.text.hc_mult
    mixes = 2 * copies + copies * copies  # pre, post and the square combination
    for part in ("attn", "ffn"):
        yield from _float32(f"{prefix}hc_{part}_fn", mixes, copies * config.text.hidden_size)
        yield from _float32(f"{prefix}hc_{part}_base", mixes)
        yield from _float32(f"{prefix}hc_{part}_scale", 3)


def _experts(config: ModelConfig, prefix: str) -> Iterator[_Named]:
    text = config.text
    hidden, inner = text.hidden_size, text.moe_intermediate_size
    yield from _plain(prefix + "gate.weight", text.n_routed_experts, hidden)
    yield from _float32(prefix + "gate.bias", text.n_routed_experts)
    yield from _float32(prefix + "gate.bias_vl", text.n_routed_experts)
    shapes = {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}
    for name, (rows, columns) in shapes.items():
        for expert in range(text.n_routed_experts):
            yield from _mxfp4(f"{prefix}experts.{expert}.{name}", rows, columns)
        yield from _fp8(f"{prefix}shared_experts.{name}", rows, columns)


def _compressor(config: ModelConfig, prefix: str, layer: LayerSpec) -> Iterator[_Named]:
    text = config.text
    latent, keys = text.head_dim, text.index_head_dim
    yield from _plain(prefix + "compressor.wkv.weight", latent, text.hidden_size)
    if layer.ratio == 2:  # ratio 1 pools nothing, so it has no gate
        yield from _plain(prefix + "compressor.wgate.weight", latent, text.hidden_size)
    yield from _plain(prefix + "compressor.norm.weight", latent)
    yield from _plain(prefix + "indexer.wk.weight", keys, latent)
    yield from _plain(prefix + "indexer.k_norm.weight", keys)


def _index_queries(config: ModelConfig, prefix: str) -> Iterator[_Named]:
    text = config.text
    yield from _fp8(prefix + "wq_b", text.index_n_heads * text.index_head_dim, text.q_lora_rank)
    yield from _plain(prefix + "weights_proj.weight", text.index_n_heads, text.hidden_size)


def _engram(config: ModelConfig, prefix: str, layer: int) -> Iterator[_Named]:
    text = config.text
    copies, hidden, width = text.hc_mult, text.hidden_size, text.engram_head_dim
    rows = text.engram_num_embeddings[text.engram_layer_ids.index(layer)]
    columns = (text.engram_max_ngram_size - 1) * text.engram_n_heads
    yield from _quantized(
        prefix + "embed", (rows, width), "F8_E4M3", (rows, width // QUANT_GROUP), Storage.TABLE
    )
    yield from _fp8(
        prefix + "wkv", (copies + 1) * hidden, columns * width
    )  # a key per copy, one shared value
    yield from _plain(prefix + "q_weight", copies, hidden)
    yield from _plain(prefix + "k_weight", copies, hidden)


def _plain(name: str, *shape: int) -> Iterator[_Named]:
    yield name, TensorSpec(shape, _NUMBERS, Storage.PLAIN)


def _float32(name: str, *shape: int) -> Iterator[_Named]:
    yield name, TensorSpec(shape, frozenset({"F32"}), Storage.PLAIN)


def _fp8(name: str, rows: int, columns: int) -> Iterator[_Named]:
    blocks = (-(-rows // QUANT_GROUP), -(-columns // QUANT_GROUP))
    return _quantized(name, (rows, columns), "F8_E4M3", blocks, Storage.FP8)


def _mxfp4(name: str, rows: int, columns: int) -> Iterator[_Named]:
    return _quantized(name, (rows, columns // 2), "I8", (rows, columns // QUANT_GROUP), Storage.MXFP4)


def _quantized(
    name: str, shape: tuple[int, int], dtype: str, scale_shape: tuple[int, int], storage: Storage
) -> Iterator[_Named]:
    weight = name + ".weight"
    yield weight, TensorSpec(shape, frozenset({dtype}), storage)
    yield name + ".scale", TensorSpec(scale_shape, frozenset({"F8_E8M0"}), Storage.SCALE, scale_of=weight)
