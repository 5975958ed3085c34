import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from epdserve.model.compressed_tokens import load_or_derive_token_map
from epdserve.model.config import ModelConfig
from epdserve.model.demo import writer
from epdserve.model.demo.writer import is_demo_model, write_demo_model
from epdserve.model.errors import DemoModelError
from epdserve.model.tokenizer import Tokenizer
from epdserve.model.weights import load_weights
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("models") / "demo")


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_model_is_complete_and_of_the_agreed_size(demo: Path) -> None:
    assert sorted(path.name for path in demo.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert 3e6 < sum(path.stat().st_size for path in demo.iterdir()) < 10e6


def test_two_runs_write_the_same_bytes_into_an_empty_directory_too(demo: Path, tmp_path: Path) -> None:
    assert digests(write_demo_model(tmp_path)) == digests(demo)


def test_another_seed_writes_other_weights_only(demo: Path, tmp_path: Path) -> None:
    other = digests(write_demo_model(tmp_path / "other", seed=1))
    same = digests(demo)
    assert {name for name in same if other[name] != same[name]} == {"model.safetensors", "config.json"}


def test_model_loads_with_its_own_config_and_token_map(demo: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in demo.iterdir():  # a load leaves a sidecar; the fixture stays as written
        (copy / path.name).write_bytes(path.read_bytes())
    config = ModelConfig.from_directory(copy)
    weights = load_weights(copy, config)
    assert weights.tensors["layers.0.ffn.experts.w1"].shape == (8, 64, 128)
    assert len(load_or_derive_token_map(copy, config)) == Tokenizer.from_directory(copy).vocab_size


def test_answers_can_end_and_never_show_markers(demo: Path) -> None:
    head = load_file(demo / "model.safetensors")["head.weight"].float()
    tokenizer = Tokenizer.from_directory(demo)
    norms = head.norm(dim=1)
    assert norms[1] > norms.median() * 1.3
    assert norms[tokenizer.marker_id("</think>")] > norms.median() * 1.3
    assert norms[tokenizer.marker_id("<think>")] == 0
    assert norms[tokenizer.encode("\u4e2d")].tolist() == [0, 0, 0]


def test_weights_use_the_published_storage_formats(demo: Path) -> None:
    tensors = load_file(demo / "model.safetensors")
    assert tensors["layers.0.attn.wkv.weight"].dtype == torch.float8_e4m3fn
    assert tensors["layers.0.attn.wkv.scale"].dtype == torch.float8_e8m0fnu
    assert tensors["layers.0.ffn.experts.0.w1.weight"].dtype == torch.int8
    assert tensors["embed.weight"].dtype == torch.bfloat16
    assert tensors["layers.0.hc_attn_fn"].dtype == torch.float32


def test_a_demo_model_is_replaced_whole(demo: Path, tmp_path: Path) -> None:
    target = tmp_path / "demo"
    target.mkdir()
    (target / "config.json").write_bytes((demo / "config.json").read_bytes())
    (target / "model.safetensors").write_bytes(b"cut short")
    write_demo_model(target)
    assert digests(target).keys() == digests(demo).keys()
    assert (target / "model.safetensors").stat().st_size > 1e6
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_only_a_demo_model_is_recognised(demo: Path, tmp_path: Path) -> None:
    assert is_demo_model(demo)
    assert not is_demo_model(tmp_path)


@pytest.mark.parametrize("name", ["notes.txt", "config.json"])
def test_a_directory_with_anything_else_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(DemoModelError, match="another directory"):
        write_demo_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_demo_model_with_somebodys_file_in_it_is_left_alone(tmp_path: Path, demo: Path) -> None:
    for path in demo.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "my-notes.txt").write_text("mine")
    with pytest.raises(DemoModelError):
        write_demo_model(tmp_path)
    assert (tmp_path / "my-notes.txt").exists()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("")
    with pytest.raises(DemoModelError, match="not a directory"):
        write_demo_model(tmp_path / "demo")


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "demo"
    target.mkdir()

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(writer, "train_tokenizer", full_disk)
    with pytest.raises(DemoModelError, match="No space"):
        write_demo_model(target)
    assert list(target.iterdir()) == []
    assert list(tmp_path.iterdir()) == [target]


def test_a_preset_that_disagrees_with_the_tokenizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = writer.config_document(0)
    document["image_token_id"] = 7
    monkeypatch.setattr(writer, "config_document", lambda _: json.loads(json.dumps(document)))
    with pytest.raises(DemoModelError, match="has id 4086, config says 7"):
        write_demo_model(tmp_path / "demo")
