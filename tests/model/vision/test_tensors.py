"""Official names and shapes, and loading beside a language model."""

from pathlib import Path

import pytest
import torch
from epdserve.model.config import ModelConfig
from epdserve.model.errors import ConfigError, WeightFileError, WeightMapError
from epdserve.model.vision.encoder import VisionEncoder
from epdserve.model.vision.tensors import load_vision_tensors, vision_tensors
from epdserve.model.weights import expected_tensors, load_tensors
from support.released_config import released_document
from support.tiny_checkpoint import TINY, split, tiny_tensors, write_shards
from support.vision import small_config, small_tensors

CONFIG = small_config()


def write(directory: Path, vision: dict[str, torch.Tensor]) -> Path:
    write_shards(directory, split(tiny_tensors() | vision, 3))
    return directory


def test_the_released_tower_has_the_published_tensors() -> None:
    specs = vision_tensors(ModelConfig.from_json(released_document()))
    shapes = {name: spec.shape for name, spec in specs.items()}
    assert shapes["vision.patch_embed.proj.weight"] == (1024, 588)
    assert shapes["vision.blocks.31.attn.wqkv.weight"] == (3072, 1024)
    assert shapes["vision.blocks.0.attn.wqkv.bias"] == (3072,)
    assert shapes["vision.blocks.0.attn.wo.bias"] == (1024,)
    assert shapes["vision.blocks.7.mlp.w1.weight"] == (5632, 1024)
    assert shapes["vision.blocks.7.mlp.w2.weight"] == (1024, 2816)
    assert shapes["aligner.w1.weight"] == (5120, 9216)
    assert shapes["aligner.w2.bias"] == (5120,)
    assert shapes["image_newline"] == (5120,)
    assert "vision.blocks.32.norm1.weight" not in shapes
    numbers = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert round(2 * numbers / 2**30, 2) == 0.90  # GiB in bfloat16 (spec/modules 3.1)


def test_a_vision_encoder_loads_beside_a_language_model_and_does_not_disturb_it(tmp_path: Path) -> None:
    directory = write(tmp_path, small_tensors(CONFIG))
    encoder = VisionEncoder.load(directory, CONFIG)
    assert len(encoder.fingerprint) == 16
    names = {name for name, _ in load_tensors(directory, expected_tensors(CONFIG))}
    assert names == set(expected_tensors(CONFIG))


def test_any_changed_number_gives_another_fingerprint(tmp_path: Path) -> None:
    tensors = small_tensors(CONFIG)
    one = load_vision_tensors(write(tmp_path, tensors), CONFIG)[1]
    assert load_vision_tensors(tmp_path, CONFIG)[1] == one
    tensors["image_end"][3] += 1e-3
    other = load_vision_tensors(write(tmp_path, tensors), CONFIG)[1]
    wider = CONFIG.model_copy(update={"vision": CONFIG.vision.model_copy(update={"min_pixels": 401})})
    assert len({one, other, load_vision_tensors(tmp_path, wider)[1]}) == 3


def test_every_fault_is_named(tmp_path: Path) -> None:
    tensors = small_tensors(CONFIG)
    del tensors["vision.norm.weight"]
    tensors["image_end"] = tensors["image_end"][:-1].clone()
    tensors["aligner.w1.bias"] = tensors["aligner.w1.bias"].half()
    with pytest.raises(WeightMapError) as caught:
        load_vision_tensors(write(tmp_path, tensors), CONFIG)
    assert [problem.split()[1] for problem in caught.value.problems] == [
        "vision.norm.weight",
        "aligner.w1.bias",
        "image_end",
    ]


def test_a_value_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    tensors = small_tensors(CONFIG)
    tensors["image_start"][0] = float("nan")
    with pytest.raises(WeightFileError, match="image_start"):
        load_vision_tensors(write(tmp_path, tensors), CONFIG)


def test_a_model_of_text_has_no_vision_encoder() -> None:
    with pytest.raises(ConfigError, match="takes no images"):
        VisionEncoder.load(TINY, ModelConfig.from_directory(TINY))
