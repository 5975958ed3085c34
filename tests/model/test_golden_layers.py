"""bf16q and native, layer by layer on the golden's inputs: the random model is chaotic under rounding end to end."""

import pytest
import torch
from epdserve.model.backbone import Backbone
from epdserve.model.entry_codec import entry_codec
from epdserve.model.layers.block import Residual
from epdserve.model.layers.context import ForwardContext
from epdserve.model.logits import LogitsPlan, LogitsRun
from support.golden import batch_of, golden, ids_of, tiny
from support.recorder import blocks

LENGTH = 37
SETTINGS = ["bf16q", "native"]


def layers_on_golden_inputs(backbone: Backbone, arrays: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Streams after each layer, each layer fed with the golden's streams before it.

    Selections come from the run itself: a Reuse layer uses what its index source picked on golden inputs.
    """
    run = LogitsRun(backbone, ids_of(arrays, f"t{LENGTH}.ids"), LogitsPlan(), block_tokens=16)
    batch = batch_of(run, 0, LENGTH)
    context = ForwardContext(batch, run.pools, entry_codec(run.layout.entry_format), backbone.precision)
    residual = backbone.encoder._enter(batch.token_ids_T)
    out = []
    for block in blocks(backbone):
        layer = block.spec.index
        if layer:
            streams = arrays[f"t{LENGTH}.streams"][layer - 1].to(backbone.precision.activation_dtype)
            residual = Residual(streams, arrays[f"t{LENGTH}.premix"][layer - 1])
        out.append(block.forward(residual, batch.all_rows, batch.encoder_window, context).streams_TnD.float())
    return out


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_layer_on_given_inputs(setting: str) -> None:
    arrays = golden(setting)
    for layer, found in enumerate(layers_on_golden_inputs(tiny(setting), arrays)):
        expected = arrays[f"t{LENGTH}.streams"][layer].float()
        error = (found - expected).norm() / expected.norm()
        per_row = (found - expected).abs().flatten(1).max(dim=1).values.median()
        assert error < 0.05, f"layer {layer}: relative norm error {error:.4f}"
        assert per_row < 0.06, f"layer {layer}: median largest error {per_row:.4f}"


@pytest.mark.parametrize("setting", SETTINGS)
def test_end_to_end_rows_point_the_same_way(setting: str) -> None:
    arrays = golden(setting)
    logits = LogitsRun(tiny(setting), ids_of(arrays, f"t{LENGTH}.ids"), LogitsPlan()).run()
    expected = arrays[f"t{LENGTH}.logits"]
    cosine = torch.nn.functional.cosine_similarity(logits, expected, dim=1)
    assert cosine.min() > 0.95
    assert (logits.argmax(1) == expected.argmax(1)).float().mean() >= 0.7


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("prompt", [37, 5])
def test_decode_rows_point_the_same_way(setting: str, prompt: int) -> None:
    arrays = golden(setting)
    ids = ids_of(arrays, f"decode{prompt}.ids")
    logits = LogitsRun(tiny(setting), ids, LogitsPlan(prefill=prompt)).run()[prompt - 1 :]
    cosine = torch.nn.functional.cosine_similarity(logits, arrays[f"decode{prompt}.logits"], dim=1)
    assert cosine.min() > 0.95
