import json
from pathlib import Path

import pytest
import torch
from epdserve.model.checkpoint import Checkpoint
from epdserve.model.config import ModelConfig
from epdserve.model.errors import WeightFileError, WeightMapError
from epdserve.model.tensor_map import expected_tensors
from support.tiny_checkpoint import TINY, split, tiny_tensors, write_shards

EXPECTED = expected_tensors(ModelConfig.from_directory(TINY))
INDEX = "model.safetensors.index.json"


def problems_of(directory: Path) -> tuple[str, ...]:
    with pytest.raises(WeightMapError) as error:
        Checkpoint.open(directory).check(EXPECTED)
    return error.value.problems


@pytest.mark.parametrize("index", [False, True], ids=["numbered", "indexed"])
def test_shards_hold_together_what_one_file_holds(tmp_path: Path, index: bool) -> None:
    write_shards(tmp_path, split(tiny_tensors(), 3), index=index)
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.check(EXPECTED)
    assert len(checkpoint.shards) == 3
    assert set(checkpoint.headers) == set(Checkpoint.open(TINY).headers)


def test_other_safetensors_files_beside_the_model_are_left_alone() -> None:
    assert [shard.name for shard in Checkpoint.open(TINY).shards] == ["model.safetensors"]


def test_every_fault_of_a_checkpoint_is_named_in_one_error(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    del tensors["norm.weight"], tensors["layers.3.attn.wkv.scale"]
    tensors["surplus.weight"] = torch.zeros(2)
    tensors["layers.0.attn_norm.weight"] = torch.zeros(64, dtype=torch.bfloat16)
    tensors["layers.0.attn.attn_sink"] = torch.zeros(4, dtype=torch.bfloat16)
    write_shards(tmp_path, {"model.safetensors": tensors})
    assert problems_of(tmp_path) == (
        "missing: layers.3.attn.wkv.scale [2, 4]",
        "missing: norm.weight [128]",
        "dtype: layers.0.attn.attn_sink is BF16, expected F32",
        "shape: layers.0.attn_norm.weight is [64], expected [128]",
        "extra: surplus.weight F32 [2]",
    )


def test_drafter_and_vision_tensors_are_no_fault(tmp_path: Path) -> None:
    extra = {
        name: torch.zeros(1) for name in ("mtp.0.norm.weight", "vision.x", "aligner.w1.bias", "image_start")
    }
    write_shards(tmp_path, {"model.safetensors": {**tiny_tensors(), **extra}})
    Checkpoint.open(tmp_path).check(EXPECTED)


def test_a_tensor_in_two_shards_is_a_fault(tmp_path: Path) -> None:
    shards = split(tiny_tensors(), 2)
    first, second = shards
    shards[second]["norm.weight"] = shards[first].get("norm.weight", shards[second].get("norm.weight"))
    shards[first]["norm.weight"] = shards[second]["norm.weight"]
    write_shards(tmp_path, shards)
    assert problems_of(tmp_path) == (f"twice: norm.weight is in {first} and {second}",)


def test_an_index_that_disagrees_with_its_shards_is_a_fault(tmp_path: Path) -> None:
    write_shards(tmp_path, split(tiny_tensors(), 2), index=True)
    index = json.loads((tmp_path / INDEX).read_text())
    weight_map = index["weight_map"]
    first, second = sorted(set(weight_map.values()))
    weight_map["norm.weight"] = first if weight_map["norm.weight"] == second else second
    weight_map["ghost"] = first
    (tmp_path / INDEX).write_text(json.dumps(index))
    problems = problems_of(tmp_path)
    assert len(problems) == 2
    assert problems[0].startswith("index: norm.weight should be in")
    assert problems[1] == f"index: ghost should be in {first}, is in no file"


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../x.safetensors"}}',
    ],
)
def test_an_unusable_index_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(WeightFileError, match="index"):
        Checkpoint.open(tmp_path)


def test_a_directory_without_weights_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(WeightFileError, match=r"model\.safetensors"):
        Checkpoint.open(tmp_path)


def test_a_shard_named_by_the_index_but_absent_is_named(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    with pytest.raises(WeightFileError, match="model-00001-of-00001"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, -1], ids=["empty", "in length", "in header", "in data"])
def test_a_cut_file_is_refused_when_opened(tmp_path: Path, keep: int) -> None:
    (tmp_path / "model.safetensors").write_bytes((TINY / "model.safetensors").read_bytes()[:keep])
    with pytest.raises(WeightFileError, match=r"model\.safetensors"):
        Checkpoint.open(tmp_path)


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    torch.save({"norm.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightFileError):
        Checkpoint.open(tmp_path)
