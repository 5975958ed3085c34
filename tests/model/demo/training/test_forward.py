"""The trainer's forward against the golden vectors: what is trained is what is served."""

import pytest
import torch
from epdserve.kernels.quant import dequantize_fp8
from epdserve.model.compressed_tokens import load_or_derive_token_map
from epdserve.model.config import ModelConfig
from epdserve.model.demo.training.forward import TrainableBackbone
from epdserve.model.demo.training.indexing import indexer_loss
from epdserve.model.demo.training.scene import Scene, Setting
from epdserve.model.tensor_map import expected_tensors
from epdserve.model.weights import load_weights
from support.golden import TINY, golden

LENGTHS = (1, 5, 37, 129, 300)
ATOL = {"f32": 1e-4, "f32q": 1e-3}
WINDOW = 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TrainableBackbone:
    folder = tmp_path_factory.mktemp("tiny")
    for name in ("config.json", "model.safetensors", "compressed_token_map.json"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    config = ModelConfig.from_directory(folder)
    weights = dict(load_weights(folder, config).tensors)
    for name in expected_tensors(config):
        if name.endswith("engram.embed.weight"):
            scale = weights.pop(name.removesuffix("weight") + "scale")
            weights[name] = dequantize_fp8(weights[name], scale)
    token_map = torch.from_numpy(load_or_derive_token_map(folder, config))
    return TrainableBackbone(config, weights, token_map)


def scene_of(model: TrainableBackbone, ids: torch.Tensor, setting: Setting, floor: int = 0) -> Scene:
    """One sequence, filled up to whole windows; rows from ``floor`` on see no earlier window rows above the cut."""
    filled = torch.cat([ids.long(), torch.zeros(-len(ids) % WINDOW, dtype=torch.long)])[None]
    floors = torch.zeros_like(filled)
    floors[:, floor:] = floor
    return Scene(model.config.text, filled, setting, floors=(None, floors if floor else None))


def logits_of(model: TrainableBackbone, scene: Scene) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model.forward(scene))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["f32", "f32q"])
def test_logits_are_the_golden_ones(tiny: TrainableBackbone, name: str, length: int) -> None:
    arrays = golden(name)
    setting = Setting(rounds_cache=name == "f32q", selects=True)
    logits = logits_of(tiny, scene_of(tiny, arrays[f"t{length}.ids"], setting))
    rows = arrays[f"t{length}.logit_rows"].long()
    torch.testing.assert_close(logits[rows], arrays[f"t{length}.logits"], atol=ATOL[name], rtol=0)


def test_decoder_replay_is_a_floor_above_the_cut(tiny: TrainableBackbone) -> None:
    arrays = golden("f32")
    scene = scene_of(tiny, arrays["replay.ids"], Setting(selects=True), floor=93)
    logits = logits_of(tiny, scene)[100:107]
    torch.testing.assert_close(logits, arrays["replay.decoder_logits"], atol=1e-4, rtol=0)
    plain = logits_of(tiny, scene_of(tiny, arrays["replay.ids"], Setting(selects=True)))[100:107]
    assert (plain - arrays["replay.decoder_logits"]).abs().max() > 1e-2  # the floor does something


def test_gaps_move_what_rotations_compare(tiny: TrainableBackbone) -> None:
    ids = golden("f32")["t37.ids"].long()[:32][None]
    text = tiny.config.text
    plain = logits_of(tiny, Scene(text, ids, Setting()))
    shifted = logits_of(tiny, Scene(text, ids, Setting(), torch.arange(100, 132)[None]))
    torch.testing.assert_close(shifted, plain, atol=1e-3, rtol=0)  # rotations are relative
    jumping = torch.arange(32)[None] + 500 * (torch.arange(32) >= 16)
    assert (logits_of(tiny, Scene(text, ids, Setting(), jumping)) - plain).abs().max() > 1e-2


def test_the_lesson_of_the_indexer_reaches_nothing_else(tiny: TrainableBackbone) -> None:
    weights = {
        name: value.clone().requires_grad_(value.is_floating_point()) for name, value in tiny.weights.items()
    }
    model = TrainableBackbone(tiny.config, weights, tiny.layers[1].memory.token_map_V)
    scene = scene_of(tiny, golden("f32")["t129.ids"], Setting(teaches_indexer=True))
    model.forward(scene)
    indexer_loss(scene).backward()
    touched = {
        name for name, value in weights.items() if value.grad is not None and value.grad.abs().sum() > 0
    }
    assert touched
    assert all(".indexer." in name for name in touched)


def test_a_length_without_whole_windows_is_refused(tiny: TrainableBackbone) -> None:
    with pytest.raises(ValueError, match="multiple of the window"):
        Scene(tiny.config.text, torch.zeros(1, 12, dtype=torch.long), Setting())
