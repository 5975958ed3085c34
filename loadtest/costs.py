"""``python -m epdserve.loadtest.costs CONFIG``: FLOP and bytes of steps at a config, counted and by formula.

Counted means: the backbone that serves runs at the config's true shapes over tensors without memory, and every product
it asks for is counted. Its routed experts are counted as the products of the rows they were chosen for; the reference
pads them. Formulas are those of ``model/costs.py``. Then the roofline of a decode step over the context's length.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final
from unittest.mock import patch

import numpy as np
import torch
import typer
from epdserve.kernels.mhc.reference import coefficients_from_mixes_ref
from epdserve.model.backbone import Backbone
from epdserve.model.batch import ForwardBatch, Outputs, Segment
from epdserve.model.config import ModelConfig
from epdserve.model.costs import Rows, flop, kv_bytes, weight_bytes, weighted
from epdserve.model.kv_layout import EntryFormat, KVLayout
from epdserve.model.layer_plan import LayerPlan
from epdserve.model.layers.wide import WideExperts
from epdserve.model.pools import KVPools
from epdserve.model.precision import Precision
from epdserve.model.tensor_map import Storage, expected_tensors
from epdserve.model.weights import Weights
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

BLOCK_TOKENS: Final = 128
HBM_BYTES_PER_S: Final = 4.8e12  # H200 (NVIDIA's data sheet)
BF16_FLOP_PER_S: Final = 989e12  # H200, dense
Row = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Equal rows of ``batch`` requests whose contexts end at ``context``; the decoder runs the last ``kept``."""

    name: str
    batch: int
    rows: int
    context: int
    kept: int

    @property
    def formula_rows(self) -> Rows:
        """The same for the formulas, in the way the reference works."""
        return Rows(
            self.batch * self.rows,
            self.batch * self.kept,
            self.batch * (self.kept > 0),
            self.context,
            scores_all=True,
        )


def counted_flop(config: ModelConfig, chunks: Sequence[Chunk]) -> list[int]:
    """FLOP of each chunk's forward and logits, counted over shapes alone.

    Tables that kernels keep are made without memory too: call it in a process of its own.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        weights = _shapes_alone(config)
    copies = config.text.hc_mult
    mixes = torch.zeros(1, copies * (copies + 2), dtype=torch.float64)
    # Constants that the reference keeps are real, and so are numbers that the constructor looks at
    coefficients_from_mixes_ref(mixes, torch.ones(3), mixes[0], copies, config.text.hc_sinkhorn_iters, 1e-6)
    backbone = Backbone(
        config, weights, torch.zeros(config.text.vocab_size, dtype=torch.int64), Precision.F32Q
    )
    for block in (*backbone.encoder.blocks, backbone.encoder.cut_block, *backbone.decoder.blocks):
        experts = block.moe.experts
        assert isinstance(experts, WideExperts)
        experts.routed = _RoutedRows(experts)  # type: ignore[method-assign, assignment]
    with fake, torch.inference_mode(), patch("epdserve.model.pools.scatter_rows", lambda *_: None):
        return [_count(backbone, chunk) for chunk in chunks]


class _RoutedRows:
    """The products of rows with the experts they chose, each row with each of its experts once."""

    def __init__(self, experts: WideExperts) -> None:
        self._experts = experts

    def __call__(self, x_TD: torch.Tensor, experts_Tk: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        experts = self._experts
        x_PD = x_TD.float().repeat_interleave(experts_Tk.shape[1], dim=0)
        gate, _up = torch.mm(x_PD, experts.w13_ENK[0].t()).chunk(2, dim=-1)
        return torch.mm(gate, experts.w2_EKN[0].t())[: len(x_TD)]


def _shapes_alone(config: ModelConfig) -> Weights:
    tensors: dict[str, torch.Tensor] = {}
    for name, spec in expected_tensors(config).items():
        columns = 2 if spec.storage is Storage.MXFP4 else 1
        shape = (*spec.shape[:-1], spec.shape[-1] * columns)
        if ".ffn.experts." in name:
            prefix, expert, part = name.rsplit(".", 3)[0], *name.rsplit(".", 3)[1:3]
            if expert == "0" and spec.storage is not Storage.SCALE:
                tensors[f"{prefix}.{part}"] = torch.empty(config.text.n_routed_experts, *shape)
        elif spec.storage is Storage.TABLE or ".engram.embed." in name:
            tensors[name] = torch.empty(spec.shape, dtype=torch.uint8)
        elif spec.storage is not Storage.SCALE:
            tensors[name] = torch.empty(shape)
    return Weights(tensors, b"")


def _count(backbone: Backbone, chunk: Chunk) -> int:
    layout = backbone.layout(BLOCK_TOKENS)
    pages = -(-chunk.context // BLOCK_TOKENS)
    pools = KVPools(backbone.config, layout, num_pages=pages, num_slots=chunk.batch)
    tokens = np.full(chunk.context, 3, dtype=np.int64)
    segments = [
        Segment(
            tokens,
            chunk.context - chunk.rows,
            chunk.rows,
            range(pages),
            slot,
            decoder_from=chunk.context - chunk.kept,
            decoder_floor=chunk.context - chunk.kept,
            outputs=Outputs.LAST if chunk.kept else Outputs.NONE,
        )
        for slot in range(chunk.batch)
    ]
    batch = ForwardBatch.build(segments, backbone.batch_shape(layout))
    with FlopCounterMode(display=False) as counter:
        backbone.logits(backbone.forward(batch, pools))
    return int(counter.get_total_flops())


def compare(config: ModelConfig, chunks: Sequence[Chunk]) -> list[Row]:
    """Chunk, counted and by formula in GFLOP, and their ratio."""
    rows = []
    for chunk, counted in zip(chunks, counted_flop(config, chunks), strict=True):
        formula = sum(flop(config, chunk.formula_rows).values())
        rows.append((chunk.name, f"{counted / 1e9:.1f}", f"{formula / 1e9:.1f}", f"{counted / formula:.4f}"))
    return rows


def compare_bytes(config: ModelConfig) -> list[Row]:
    """Bytes of weights, a token's global KV and a window row: the sum over all tensors and planes, and closed forms."""
    layout = KVLayout.of(config, block_tokens=BLOCK_TOKENS, entry_format=EntryFormat.PACKED)
    text, plan = config.text, LayerPlan.of(config)
    entry = text.head_dim // 2 + text.head_dim // 16 + text.index_head_dim // 2 + text.index_head_dim // 32
    token = sum(entry / layer.ratio for layer in plan.layers if layer.writes_cache)
    window = text.head_dim + text.head_dim // 32
    everything = weight_bytes(config, rows=10**6)
    pairs = [
        ("weights that steps read, GB", everything / 1e9, _closed_weight_bytes(config) / 1e9),
        ("global KV of a token, bytes", layout.bytes_per_token, token),
        ("window row of a layer, bytes", layout.window_values_bytes + layout.window_scales_bytes, window),
    ]
    return [(name, f"{a:.4g}", f"{b:.4g}", f"{a / b:.4f}") for name, a, b in pairs]


def _closed_weight_bytes(config: ModelConfig) -> float:
    """FLOP of one row over all experts, by their stored width: a weight is 2 FLOP a row."""
    text = config.text
    one = flop(config, Rows(1, 1, 1, 1))
    per_flop = {"fp8": (1 + 1 / 1024) / 2, "bf16": 2 / 2, "fp32": 4 / 2}
    expert = 6 * text.hidden_size * text.moe_intermediate_size
    routed = len(LayerPlan.of(config).layers) * expert
    attended = 4 * text.num_attention_heads * text.head_dim
    seen = sum(
        text.sliding_window + (text.index_topk if layer.ratio else 0) for layer in LayerPlan.of(config).layers
    )
    mixing = 4 * text.hc_mult**2 * text.hidden_size * len(LayerPlan.of(config).layers)
    grouped = 2 * text.num_attention_heads * text.head_dim * text.o_lora_rank
    total = sum(count * per_flop[rate.value] for (_, rate), count in one.items())
    total -= (
        routed * text.num_experts_per_tok * per_flop["fp8"]
        - routed * text.n_routed_experts * (0.5 + 1 / 32) / 2
    )
    total -= attended * seen + mixing * per_flop["fp32"]
    total -= grouped * len(LayerPlan.of(config).layers) * (1 - per_flop["fp8"])  # wo_a is stored in FP8
    for layer in LayerPlan.of(config).layers:
        if layer.scores_entries:  # not read while every entry is selected: not in the FLOP of one row
            total += text.index_n_heads * (text.q_lora_rank * text.index_head_dim + 2 * text.hidden_size)
        if layer.writes_cache and layer.ratio > 1:  # an entry's key is made once for ``ratio`` rows
            total += 2 * text.head_dim * text.index_head_dim * (1 - 1 / layer.ratio)
    return total


def decode_roofline(config: ModelConfig, contexts: Sequence[int], batches: Sequence[int]) -> list[list[str]]:
    """Batch; then microseconds of a step at each context; then the last over the first."""
    layout = KVLayout.of(config, block_tokens=BLOCK_TOKENS, entry_format=EntryFormat.PACKED)
    table = []
    for batch in batches:
        times = [_decode_s(config, layout, batch, context) for context in contexts]
        table.append([str(batch), *(f"{1e6 * each:.0f}" for each in times), f"{times[-1] / times[0]:.2f}"])
    return table


def flop_growth(config: ModelConfig, contexts: Sequence[int]) -> list[list[str]]:
    """Context; weighted GFLOP and cache bytes of one decoded token; weighted FLOP over those of the first context."""
    layout = KVLayout.of(config, block_tokens=BLOCK_TOKENS, entry_format=EntryFormat.PACKED)
    first, table = weighted(flop(config, Rows(1, 1, 1, contexts[0]))), []
    for context in contexts:
        rows = Rows(1, 1, 1, context)
        work = weighted(flop(config, rows))
        cache = kv_bytes(config, layout, rows) / 1e6
        table.append([f"{context:,}", f"{work / 1e9:.2f}", f"{cache:.1f}", f"{work / first:.2f}"])
    return table


def _decode_s(config: ModelConfig, layout: KVLayout, batch: int, context: int) -> float:
    rows = Rows(batch, batch, batch, context)
    nbytes = weight_bytes(config, rows=batch) + batch * kv_bytes(config, layout, rows)
    return max(nbytes / HBM_BYTES_PER_S, weighted(flop(config, rows)) / BF16_FLOP_PER_S)


CHUNKS: Final = (
    Chunk("prefill, the first 256 rows of a longer prompt", 1, 256, 256, 0),
    Chunk("prefill, the last 256 of 8,192, decoder replay", 1, 256, 8192, 128),
    Chunk("prefill, the last 256 of 8,192, every row", 1, 256, 8192, 256),
    Chunk("decode, batch 8, 4,096 tokens", 8, 1, 4096, 1),
    Chunk("decode, batch 8, 131,072 tokens", 8, 1, 131_072, 1),
)
CONTEXTS: Final = (4096, 32_768, 131_072, 1_048_576)
BATCHES: Final = (1, 8, 32, 128)


def main(
    config: Annotated[Path, typer.Argument(help="A published config.json.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What steps cost at a config. Exit status 1 if counts and formulas differ by more than 1 %."""
    model = ModelConfig.model_validate(json.loads(config.read_text()))
    rows = [*compare(model, CHUNKS), *compare_bytes(model)]
    growth, roofline = flop_growth(model, CONTEXTS), decode_roofline(model, CONTEXTS, BATCHES)
    if as_json:
        document: dict[str, Any] = {"counted": rows, "growth": growth, "roofline_us": roofline}
        print(json.dumps(document))
    else:
        _print(["GFLOP, or as named", "counted", "formula", "counted / formula"], rows)
        _print(["context", "weighted GFLOP a token", "MB of caches a token", "against 4,096"], growth)
        heads = [f"us at {context:,}" for context in CONTEXTS]
        _print(["batch", *heads, "last / first"], roofline)
    if any(abs(float(row[3]) - 1) > 0.01 for row in rows):
        raise typer.Exit(1)


def _print(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print("", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", sep="\n")
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    typer.run(main)
