"""Embeddings of images inside the causal encoder's batch: rows, chunks, routing and Engram."""

import numpy as np
import pytest
import torch
from epdserve.model.backbone import Backbone
from epdserve.model.batch import ForwardBatch, ImageSpan, Segment
from epdserve.model.logits import LogitsPlan, LogitsRun
from support.golden import fresh_tiny, tiny
from support.recorder import record

SETTING = "f32q"
IMAGE = tiny(SETTING).config.image_token_id
HIDDEN = tiny(SETTING).config.text.hidden_size
AT, LENGTH = 9, 13
OTHER_AT = 40
IDS = np.random.default_rng(3).integers(3, 490, 60)
IDS[AT : AT + LENGTH] = IMAGE
IDS[OTHER_AT : OTHER_AT + 4] = IMAGE


def drawn(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed)) * 0.5


IMAGES = (ImageSpan(AT, drawn(LENGTH, 1)), ImageSpan(OTHER_AT, drawn(4, 2)))


def logits(backbone: Backbone, images: tuple[ImageSpan, ...] = IMAGES, **plan: object) -> torch.Tensor:
    return LogitsRun(backbone, IDS, LogitsPlan(images=images, **plan), block_tokens=16).run()  # type: ignore[arg-type]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_a_span_of_one_vector_is_as_if_the_vocabulary_held_it() -> None:
    vector = drawn(1, 5)
    other = fresh_tiny(SETTING)
    other.encoder._embed_VD[IMAGE] = vector[0]
    spans = (ImageSpan(AT, vector.expand(LENGTH, -1)), ImageSpan(OTHER_AT, vector.expand(4, -1)))
    assert same_bits(logits(tiny(SETTING), spans), logits(other, ()))
    assert not same_bits(logits(tiny(SETTING), spans), logits(tiny(SETTING), ()))


@pytest.mark.parametrize("chunk", [5, 16])
def test_chunks_may_cut_an_image_anywhere(chunk: int) -> None:
    assert same_bits(logits(tiny(SETTING), chunk=chunk), logits(tiny(SETTING)))


def test_a_hit_inside_an_image_replays_its_rows_with_their_embeddings() -> None:
    whole = logits(tiny(SETTING), prefill=58, encoder_hit=16, decoder_replay=True)
    cut = logits(tiny(SETTING), prefill=58, encoder_hit=16, decoder_replay=True, chunk=3)
    assert same_bits(whole, cut)


def test_rows_of_a_batch_have_their_own_embeddings() -> None:
    shape = tiny(SETTING).batch_shape(tiny(SETTING).layout(16))
    segments = [
        Segment(IDS, 5, 7, range(4), 0, images=IMAGES),
        Segment(IDS, 0, 3, range(4), 1, images=IMAGES),
        Segment(IDS, 38, 10, range(4), 2, images=IMAGES),
    ]
    embedded = ForwardBatch.build(segments, shape).embedded
    assert embedded is not None
    assert embedded.rows_N.tolist() == [4, 5, 6, 12, 13, 14, 15]
    assert torch.equal(embedded.values_ND, torch.cat((IMAGES[0].embeddings_ND[:3], IMAGES[1].embeddings_ND)))
    assert ForwardBatch.build(segments[1:2], shape).embedded is None


def test_image_rows_pass_engram_unchanged_and_hide_what_stands_before_them() -> None:
    backbone = fresh_tiny(SETTING)
    recorder = record(backbone)
    logits(backbone)
    layer = backbone.plan.engram_layers[0]
    rows = recorder.engram_rows[layer]
    assert (rows[AT : AT + LENGTH] == rows[AT]).all()  # all of them hash pads
    shown = IDS.copy()
    shown[: AT + LENGTH] = 17
    context = np.stack([np.roll(shown, back) for back in range(4)], axis=1)
    for row in range(AT + LENGTH, AT + LENGTH + 4):
        seen = context[row].copy()
        seen[np.arange(4) > row - AT - LENGTH] = -1
        address = backbone.encoder.blocks[layer].engram.address(torch.from_numpy(seen[None]))
        assert torch.equal(rows[row], address[0])


def test_image_rows_are_routed_with_their_own_bias() -> None:
    backbone = fresh_tiny(SETTING)
    layer = backbone.encoder.blocks[0].moe
    before = logits(backbone)
    layer.bias_vl_E = layer.bias_vl_E + torch.linspace(5, -5, len(layer.bias_vl_E))
    after = logits(backbone)
    assert same_bits(before[:AT], after[:AT])
    assert not same_bits(before[AT:], after[AT:])
