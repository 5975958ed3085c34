"""bf16q and native, layer by layer on the golden's inputs: the random model is chaotic under rounding end to end.

Bounds are those of the golden README: relative norm error 5 %, a few per cent of FP4 values a step off, selections
mostly the same.
"""

from dataclasses import dataclass

import pytest
import torch
from epdserve.model.backbone import Backbone
from epdserve.model.layers.block import Residual
from epdserve.model.layers.context import ForwardContext
from epdserve.model.logits import LogitsPlan, LogitsRun
from support.golden import batch_of, fresh_tiny, golden, ids_of, index_cache, main_cache, tiny, window_cache
from support.recorder import Recorder, blocks, record

LENGTH = 37
ROWS = [0, LENGTH // 3, 2 * LENGTH // 3, LENGTH - 2, LENGTH - 1]
SETTINGS = ["bf16q", "native"]
SOURCES = {2: 2, 4: 2, 6: 1}
INDEX_SOURCES = (2, 4, 6, 8, 10)


# The golden of bf16q holds fewer arrays.
only_native = pytest.mark.parametrize("layers", ["native"], indirect=True, scope="module")


@dataclass
class LayerRun:
    arrays: dict[str, torch.Tensor]
    recorder: Recorder
    run: LogitsRun


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def run_layers(backbone: Backbone, arrays: dict[str, torch.Tensor]) -> LayerRun:
    """Each layer fed with the golden's streams before it; a Reuse layer uses what its index source picked there."""
    recorder = record(backbone)
    run = LogitsRun(backbone, ids_of(arrays, "ids"), LogitsPlan(), block_tokens=16)
    batch = batch_of(run, 0, LENGTH)
    context = ForwardContext(batch, run.pools, backbone.caches(batch, run.pools))
    residual = backbone.encoder._enter(batch)
    with torch.inference_mode():
        for block in blocks(backbone):
            layer = block.spec.index
            if layer:
                streams = arrays["streams"][layer - 1].to(backbone.precision.activation_dtype)
                residual = Residual(streams, arrays["premix"][layer - 1])
            block.forward(residual, batch.all_rows, batch.encoder_window, context)
    return LayerRun(arrays, recorder, run)


@pytest.fixture(scope="module", params=SETTINGS)
def layers(request: pytest.FixtureRequest) -> LayerRun:
    arrays = {k[4:]: v for k, v in golden(request.param).items() if k.startswith("t37.")}
    return run_layers(fresh_tiny(request.param), arrays)


@pytest.mark.parametrize("layer", range(12))
def test_streams_and_carried_coefficients(layers: LayerRun, layer: int) -> None:
    found, expected = layers.recorder.streams[layer].float(), layers.arrays["streams"][layer].float()
    assert relative_error(found, expected) < 0.05
    assert (found - expected).abs().flatten(1).max(dim=1).values.median() < 0.06
    assert relative_error(layers.recorder.carried[layer], layers.arrays["premix"][layer]) < 0.05


@pytest.mark.parametrize("layer", [1, 4])
def test_engram(layers: LayerRun, layer: int) -> None:
    expected = layers.arrays[f"engram_streams.{layer}"]
    assert relative_error(layers.recorder.engram_streams[layer], expected) < 0.01
    if f"engram_rows.{layer}" in layers.arrays:
        assert torch.equal(layers.recorder.engram_rows[layer], layers.arrays[f"engram_rows.{layer}"].long())


@only_native
@pytest.mark.parametrize("layer", range(12))
def test_sublayer_outputs(layers: LayerRun, layer: int) -> None:
    assert relative_error(layers.recorder.attn_out[layer][ROWS], layers.arrays["attn_out"][layer]) < 0.08
    assert relative_error(layers.recorder.ffn_out[layer][ROWS], layers.arrays["ffn_out"][layer]) < 0.08


@pytest.mark.parametrize("layer", range(12))
def test_router(layers: LayerRun, layer: int) -> None:
    same = layers.recorder.experts[layer] == layers.arrays["router_experts"][layer].long()
    assert same.float().mean() > 0.95
    rows = same.all(dim=1)
    expected = layers.arrays["router_weights"][layer][rows]
    torch.testing.assert_close(layers.recorder.expert_weights[layer][rows], expected, atol=0.02, rtol=0)


@pytest.mark.parametrize("layer", INDEX_SOURCES)
def test_selections(layers: LayerRun, layer: int) -> None:
    expected = layers.arrays[f"topk.{layer}"].long()
    found = layers.recorder.entries[layer][:, : expected.shape[1]]
    shared = [len(set(f.tolist()) & set(e.tolist()) - {-1}) for f, e in zip(found, expected, strict=True)]
    assert sum(shared) / int((expected >= 0).sum()) > 0.95
    if f"index_score_last.{layer}" in layers.arrays:
        scores = layers.arrays[f"index_score_last.{layer}"]
        ours = layers.recorder.scores[layer][-1, : len(scores)]
        both = scores.isfinite() & ours.isfinite()
        assert (scores.isfinite() == ours.isfinite()).float().mean() > 0.9
        assert relative_error(ours[both], scores[both]) < 0.1


@only_native
@pytest.mark.parametrize("layer", SOURCES)
def test_caches(layers: LayerRun, layer: int) -> None:
    count = LENGTH // SOURCES[layer]
    for found, name in ((main_cache, "main_kv"), (index_cache, "index_k")):
        same = found(layers.run, layer, count) == layers.arrays[f"{name}.{layer}"].float()
        assert same.float().mean() > 0.95, f"{name}: {1 - same.float().mean():.3f} of the values differ"


def test_candidate_blocks(layers: LayerRun) -> None:
    from epdserve.kernels.indexer import candidate_mask

    text = layers.run.backbone.config.text
    scores = layers.recorder.scores[6][:, :LENGTH]
    visible = torch.arange(1, LENGTH + 1)
    mask = candidate_mask(scores, visible, text.candidate_topk_blocks, text.candidate_block_size)
    padded = torch.nn.functional.pad(mask, (0, -LENGTH % text.candidate_block_size))
    found = padded.unflatten(1, (-1, text.candidate_block_size)).any(2)
    assert (found == layers.arrays["candidate_blocks.6"].bool()).float().mean() > 0.98


@only_native
def test_window_rows(layers: LayerRun) -> None:
    positions = layers.arrays["window_positions"]
    for layer in range(12):
        expected = layers.arrays["window_kv"][layer]
        assert relative_error(window_cache(layers.run, layer, positions), expected) < 0.05


@pytest.mark.parametrize("setting", SETTINGS)
def test_end_to_end_rows_point_the_same_way(setting: str) -> None:
    arrays = golden(setting)
    logits = LogitsRun(tiny(setting), ids_of(arrays, "t37.ids"), LogitsPlan()).run()
    expected = arrays["t37.logits"]
    assert torch.nn.functional.cosine_similarity(logits, expected, dim=1).min() > 0.95
    assert (logits.argmax(1) == expected.argmax(1)).float().mean() >= 0.7


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("prompt", [37, 5])
def test_decode_rows_point_the_same_way(setting: str, prompt: int) -> None:
    arrays = golden(setting)
    backbone = fresh_tiny(setting)
    recorder = record(backbone)
    ids = ids_of(arrays, f"decode{prompt}.ids")
    run = LogitsRun(backbone, ids, LogitsPlan(prefill=prompt))
    step, streams, picks = run.step, [], []

    def observed(segment, out):
        step(segment, out)
        if segment.start >= prompt:
            streams.append(recorder.streams[11][-1].float())
            picks.append([set(recorder.entries[layer][-1].tolist()) - {-1} for layer in INDEX_SOURCES])

    run.step = observed  # type: ignore[method-assign]
    logits = run.run()[prompt - 1 :]
    assert torch.nn.functional.cosine_similarity(logits, arrays[f"decode{prompt}.logits"], dim=1).min() > 0.95
    expected = arrays[f"decode{prompt}.last_stream"].float().flatten(1)
    assert torch.nn.functional.cosine_similarity(torch.stack(streams).flatten(1), expected, dim=1).min() > 0.9
    wanted = torch.stack([arrays[f"decode{prompt}.topk.{layer}"] for layer in INDEX_SOURCES], dim=1)
    shared = total = 0
    for found, sets in zip(picks, wanted.tolist(), strict=True):
        for ours, theirs in zip(found, sets, strict=True):
            shared, total = shared + len(ours & set(theirs)), total + len(set(theirs) - {-1})
    assert shared / total > 0.8
