"""What a step costs at a config: products by the precision they may run at, and bytes that must move.

Formulas, written out in loadtest/README.md ("What a step costs"); ``python -m epdserve.loadtest.costs`` holds them
against what the code that serves was counted to do. A multiplication and an addition are 2 FLOP. Element-wise work,
Sinkhorn steps and sampling are left out: below 0.1 % of the products.

d hidden, D latent, H heads, W window, K top-k, n residual copies, E entries a row may see.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from epdserve.model.config import ModelConfig
from epdserve.model.kv_layout import KVLayout
from epdserve.model.layer_plan import LayerMode, LayerPlan, LayerSpec
from epdserve.model.tensor_map import Storage, expected_tensors


class Rate(Enum):
    """Precision a product may run at."""

    FP32 = "fp32"  # residual mixing; a few hundred columns in all
    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"

    @property
    def weight(self) -> float:
        """Time of a FLOP against a bf16 product's, where every halving of the bits doubles the rate."""
        return {"fp32": 2.0, "bf16": 1.0, "fp8": 0.5, "fp4": 0.25}[self.value]


Flop = Counter[tuple[str, Rate]]
_STORED_BYTES: Final = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I8": 1, "F8_E8M0": 1}


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a step that stand at one place of their contexts.

    Attributes:
        encoder: Rows run up to the cut layer, which writes its KV for all of them.
        decoder: Those of them that the cut layer attends with and the layers above it run.
        outputs: Rows that get logits.
        context: Tokens that the last of them sees; entries are scored up to here.
        scores_all: Reindex layers score every entry and mask, as the reference does, instead of the candidate pool.
    """

    encoder: int
    decoder: int
    outputs: int
    context: int
    scores_all: bool = False


def flop(config: ModelConfig, rows: Rows) -> Flop:
    """FLOP of a step, by part of the model and rate."""
    plan, total = LayerPlan.of(config), Flop()
    for layer in plan.layers:
        written = rows.encoder if layer.index <= plan.cut else rows.decoder
        attending = rows.encoder if layer.index < plan.cut else rows.decoder
        for part, rate, once in _written(config, layer):
            total[part, rate] += once * written
        for part, rate, once in (*_attending(config, layer), *_indexing(config, layer, rows)):
            total[part, rate] += once * attending
    text = config.text
    total["head", Rate.BF16] += 2 * text.hidden_size * text.vocab_size * rows.outputs
    return total


def weighted(flop: Mapping[tuple[str, Rate], int]) -> float:
    """FLOP in bf16 products' time."""
    return sum(count * rate.weight for (_, rate), count in flop.items())


def _written(config: ModelConfig, layer: LayerSpec) -> Iterator[tuple[str, Rate, int]]:
    """FLOP of a row for what later rows need of a layer."""
    text = config.text
    d, latent = text.hidden_size, text.head_dim
    if layer.engram:
        columns = (text.engram_max_ngram_size - 1) * text.engram_n_heads
        yield "engram", Rate.FP8, 2 * columns * text.engram_head_dim * (text.hc_mult + 1) * d
    yield "attention", Rate.FP8, 2 * d * latent  # wkv
    if layer.writes_cache:
        yield "compressor", Rate.BF16, 2 * d * latent * layer.ratio  # with a gate at ratio 2
        yield "compressor", Rate.BF16, 2 * latent * text.index_head_dim // layer.ratio  # wk, an entry


def _attending(config: ModelConfig, layer: LayerSpec) -> Iterator[tuple[str, Rate, int]]:
    """FLOP of a row that leaves a layer, without index scores."""
    text = config.text
    d, latent, heads, copies = text.hidden_size, text.head_dim, text.num_attention_heads, text.hc_mult
    seen = text.sliding_window + (text.index_topk if layer.ratio else 0)
    yield "attention", Rate.FP8, 2 * d * text.q_lora_rank + 2 * text.q_lora_rank * heads * latent
    yield "attention", Rate.BF16, 4 * heads * latent * seen  # scores and values
    yield "attention", Rate.BF16, 2 * heads * latent * text.o_lora_rank  # wo_a, group by group
    yield "attention", Rate.FP8, 2 * d * text.o_groups * text.o_lora_rank  # wo_b
    mixes = copies * (copies + 2)
    yield "residual", Rate.FP32, 2 * (2 * copies * d * mixes + 2 * copies * copies * d)  # both sub-blocks
    expert = 3 * 2 * d * text.moe_intermediate_size
    yield "experts", Rate.BF16, 2 * d * text.n_routed_experts  # gate
    yield "experts", Rate.FP8, text.num_experts_per_tok * expert  # FP4 weights, FP8 activations
    yield "experts", Rate.FP8, text.n_shared_experts * expert


def _indexing(config: ModelConfig, layer: LayerSpec, rows: Rows) -> Iterator[tuple[str, Rate, int]]:
    """FLOP of a row of an index source."""
    text = config.text
    entries = scored_entries(config, layer, rows)
    if not entries:
        return  # every visible entry is taken
    width = text.index_n_heads * text.index_head_dim
    yield "indexer", Rate.FP8, 2 * text.q_lora_rank * width
    yield "indexer", Rate.BF16, 2 * text.hidden_size * text.index_n_heads
    yield "indexer", Rate.FP4, 2 * width * entries


def scored_entries(config: ModelConfig, layer: LayerSpec, rows: Rows) -> int:
    """Entries that each row of a layer is scored against; 0 where none is left out."""
    text = config.text
    if not layer.scores_entries or (entries := rows.context // layer.ratio) <= text.index_topk:
        return 0
    pool = text.candidate_topk_blocks * text.candidate_block_size
    reindexes = layer.mode is LayerMode.REINDEX and not rows.scores_all
    return min(entries, pool) if reindexes else entries


def weight_bytes(config: ModelConfig, *, rows: int) -> float:
    """Bytes of weights that a step of ``rows`` rows reads, as stored; experts as if rows chose them evenly.

    Engram tables are looked up: ``kv_bytes`` counts their rows. So is the embedding.
    """
    text = config.text
    touched = 1 - (1 - text.num_experts_per_tok / text.n_routed_experts) ** rows
    total = 0.0
    for name, spec in expected_tensors(config).items():
        if name == "embed.weight" or ".engram.embed." in name:
            continue
        nbytes = _elements(spec.shape) * _STORED_BYTES[_dtype(spec.dtypes, spec.storage)]
        total += nbytes * (touched if ".ffn.experts." in name else 1)
    return total


def read_weights(config: ModelConfig) -> int:
    """How many weights a step reads that touches every expert; embeddings and Engram tables are looked up."""
    return sum(
        _elements(spec.shape) * (2 if spec.storage is Storage.MXFP4 else 1)
        for name, spec in expected_tensors(config).items()
        if name != "embed.weight" and ".engram.embed." not in name and spec.storage is not Storage.SCALE
    )


def kv_bytes(config: ModelConfig, layout: KVLayout, rows: Rows) -> int:
    """Bytes of caches and tables that one decode row reads: windows, selected entries, index keys, Engram rows."""
    text, total = config.text, 0
    window = layout.window_values_bytes + layout.window_scales_bytes
    planes = {plane.layer: plane for plane in layout.planes}
    for layer in LayerPlan.of(config).layers:
        total += window * min(text.sliding_window, rows.context)
        if layer.kv_source is not None:
            plane, entries = planes[layer.kv_source], rows.context // layer.ratio
            total += (plane.main_values_bytes + plane.main_scales_bytes) * min(text.index_topk, entries)
            keys = plane.index_values_bytes + plane.index_scales_bytes
            total += keys * scored_entries(config, layer, rows)
        if layer.engram:
            columns = (text.engram_max_ngram_size - 1) * text.engram_n_heads
            total += columns * (text.engram_head_dim + text.engram_head_dim // 32)
    return total


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _dtype(dtypes: frozenset[str], storage: Storage) -> str:
    """The dtype that the published checkpoint has."""
    return "BF16" if storage is Storage.PLAIN and "BF16" in dtypes else next(iter(dtypes))
