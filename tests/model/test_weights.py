from pathlib import Path

import pytest
import torch
from epdserve.kernels.quant import dequantize_fp8_blocks, dequantize_mxfp4
from epdserve.model import weights as weights_module
from epdserve.model.config import ModelConfig
from epdserve.model.errors import WeightFileError, WeightMapError
from epdserve.model.fingerprint import SIDECAR_FILE, Fingerprinter
from epdserve.model.tensor_map import expected_tensors
from epdserve.model.weights import Weights, load_tensors, load_weights
from support.tiny_checkpoint import TINY, split, tiny_tensors, write_shards

CONFIG = ModelConfig.from_directory(TINY)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_shards(directory, {"model.safetensors": tiny_tensors()})
    return directory


@pytest.fixture(scope="module")
def loaded(model_dir: Path) -> Weights:
    return load_weights(model_dir, CONFIG)


def test_dense_weights_are_dequantised_and_their_scales_gone(loaded: Weights) -> None:
    stored = tiny_tensors()
    name = "layers.6.attn.wq_b"
    expected = dequantize_fp8_blocks(stored[name + ".weight"], stored[name + ".scale"].view(torch.uint8))
    assert torch.equal(loaded.tensors[name + ".weight"], expected)
    assert name + ".scale" not in loaded.tensors


def test_experts_are_stacked_in_their_order(loaded: Weights) -> None:
    stored = tiny_tensors()
    for matrix, shape in {"w1": (8, 64, 128), "w2": (8, 128, 64), "w3": (8, 64, 128)}.items():
        stack = loaded.tensors[f"layers.3.ffn.experts.{matrix}"]
        assert stack.shape == shape
        for expert in range(8):
            name = f"layers.3.ffn.experts.{expert}.{matrix}"
            scale = stored[name + ".scale"].view(torch.uint8)
            assert torch.equal(stack[expert], dequantize_mxfp4(stored[name + ".weight"], scale)), name


def test_plain_tensors_become_float32(loaded: Weights) -> None:
    stored = tiny_tensors()
    for name in ("embed.weight", "layers.2.attn.compressor.wgate.weight", "layers.0.attn.attn_sink"):
        assert loaded.tensors[name].dtype == torch.float32
        assert torch.equal(loaded.tensors[name], stored[name].float())


def test_engram_tables_stay_as_stored(loaded: Weights) -> None:
    stored = tiny_tensors()
    for part in ("weight", "scale"):
        name = f"layers.4.engram.embed.{part}"
        assert torch.equal(loaded.tensors[name], stored[name].view(torch.uint8))


def test_every_value_is_exact_in_bfloat16(loaded: Weights) -> None:
    wide = {
        name for name in loaded.tensors if "hc_" in name or "bias" in name or "sink" in name
    }  # stored as F32
    for name in loaded.tensors.keys() - wide:
        value = loaded.tensors[name]
        assert value.dtype == torch.uint8 or torch.equal(value, value.bfloat16().float()), name


@pytest.mark.parametrize("index", [False, True], ids=["numbered", "indexed"])
def test_shards_change_neither_tensors_nor_fingerprint(tmp_path: Path, loaded: Weights, index: bool) -> None:
    write_shards(tmp_path, split(tiny_tensors(), 3), index=index)
    sharded = load_weights(tmp_path, CONFIG)
    assert sharded.fingerprint == loaded.fingerprint
    assert sharded.tensors.keys() == loaded.tensors.keys()
    assert all(torch.equal(sharded.tensors[name], loaded.tensors[name]) for name in loaded.tensors)


def test_one_flipped_bit_changes_the_fingerprint(tmp_path: Path, loaded: Weights) -> None:
    tensors = tiny_tensors()
    tensors["layers.9.ffn.experts.5.w2.weight"][3, 3] ^= 1
    write_shards(tmp_path, {"model.safetensors": tensors})
    assert load_weights(tmp_path, CONFIG).fingerprint != loaded.fingerprint


def test_skipped_tensors_count_for_the_fingerprint_too(tmp_path: Path, loaded: Weights) -> None:
    write_shards(tmp_path, {"model.safetensors": {**tiny_tensors(), "mtp.0.norm.weight": torch.zeros(1)}})
    weights = load_weights(tmp_path, CONFIG)
    assert weights.fingerprint != loaded.fingerprint
    assert weights.tensors.keys() == loaded.tensors.keys()


def test_second_load_takes_the_fingerprint_from_the_sidecar(
    model_dir: Path, loaded: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (model_dir / SIDECAR_FILE).exists()
    monkeypatch.setattr(Fingerprinter, "add", lambda *_: pytest.fail("hashed again"))
    assert load_weights(model_dir, CONFIG).fingerprint == loaded.fingerprint


def test_changed_weights_are_hashed_again_in_spite_of_the_sidecar(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    write_shards(tmp_path, {"model.safetensors": tensors})
    before = load_weights(tmp_path, CONFIG).fingerprint
    tensors["norm.weight"][0] += 1
    write_shards(tmp_path, {"model.safetensors": {**tensors, "mtp.pad": torch.zeros(1)}})
    assert load_weights(tmp_path, CONFIG).fingerprint != before


def test_a_map_error_comes_before_any_tensor_is_read(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    del tensors["head.weight"]
    write_shards(tmp_path, {"model.safetensors": tensors})
    with pytest.raises(WeightMapError, match=r"missing: head\.weight"):
        load_tensors(tmp_path, expected_tensors(CONFIG))
    with pytest.raises(WeightMapError, match=r"missing: head\.weight"):
        load_weights(tmp_path, CONFIG)


def test_tensors_are_streamed_with_a_scale_before_its_weight() -> None:
    names = [name for name, _ in load_tensors(TINY, expected_tensors(CONFIG))]
    assert len(names) == len(set(names)) == len(expected_tensors(CONFIG))
    assert names.index("layers.0.attn.wkv.scale") + 1 == names.index("layers.0.attn.wkv.weight")


@pytest.mark.parametrize(
    ("name", "byte"),
    [
        ("layers.0.attn.wkv.weight", 0x7F),
        ("layers.0.attn.wkv.scale", 0xFF),
        ("layers.0.ffn.experts.0.w1.scale", 0xFF),
    ],
)
def test_nan_is_refused_by_name(tmp_path: Path, name: str, byte: int) -> None:
    tensors = tiny_tensors()
    tensors[name].view(torch.uint8)[0, 0] = byte
    write_shards(tmp_path, {"model.safetensors": tensors})
    with pytest.raises(WeightFileError, match=name.rsplit(".", 1)[0]):
        load_weights(tmp_path, CONFIG)


def test_plain_infinity_is_refused_by_name(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors["norm.weight"][0] = float("inf")
    write_shards(tmp_path, {"model.safetensors": tensors})
    with pytest.raises(WeightFileError, match=r"norm\.weight"):
        load_weights(tmp_path, CONFIG)


def test_shards_swapped_while_reading_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path, {"model.safetensors": tiny_tensors()})
    stamps = iter([[("model.safetensors", 1, 1)], [("model.safetensors", 1, 2)]])
    monkeypatch.setattr(weights_module, "stamp_shards", lambda _: next(stamps))
    with pytest.raises(WeightFileError, match="changed while"):
        load_weights(tmp_path, CONFIG)
    assert not (tmp_path / SIDECAR_FILE).exists()
