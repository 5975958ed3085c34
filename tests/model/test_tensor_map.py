import re
from collections import Counter
from pathlib import Path

from epdserve.model.checkpoint import Checkpoint
from epdserve.model.config import ModelConfig
from epdserve.model.tensor_map import Storage, expected_tensors
from support.released_config import released_document

TINY = Path(__file__).parents[1] / "golden" / "tiny"


def test_golden_checkpoint_holds_exactly_the_expected_tensors() -> None:
    expected = expected_tensors(ModelConfig.from_directory(TINY))
    headers = Checkpoint.open(TINY).headers
    assert set(expected) == set(headers)
    for name, header in headers.items():
        assert header.shape == expected[name].shape, name
        assert header.dtype in expected[name].dtypes, name


def test_released_counts_equal_the_published_ones() -> None:
    names = expected_tensors(ModelConfig.from_json(released_document()))
    patterns = Counter(re.sub(r"\b\d+\b", "*", name) for name in names)
    assert patterns["layers.*.attn.wq_a.weight"] == 40
    assert patterns["layers.*.attn.compressor.wkv.weight"] == 4
    assert patterns["layers.*.attn.compressor.wgate.weight"] == 3
    assert patterns["layers.*.attn.indexer.wq_b.weight"] == 8
    assert patterns["layers.*.attn.indexer.wk.weight"] == 4
    assert patterns["layers.*.engram.embed.weight"] == 2
    experts = [f"layers.*.ffn.experts.*.{matrix}.weight" for matrix in ("w1", "w2", "w3")]
    assert sum(patterns[name] for name in experts) == 40 * 384 * 3


def test_released_shapes_equal_the_published_ones() -> None:
    specs = expected_tensors(ModelConfig.from_json(released_document()))
    published = {
        "layers.0.attn.wq_b.weight": (32768, 1280),
        "layers.0.attn.wq_b.scale": (1024, 40),
        "layers.7.attn.wo_a.weight": (8192, 4096),
        "layers.7.attn.wo_a.scale": (256, 128),
        "layers.7.attn.wo_b.weight": (5120, 8192),
        "layers.3.hc_ffn_fn": (24, 20480),
        "layers.3.ffn.experts.383.w1.weight": (2304, 2560),
        "layers.3.ffn.experts.383.w1.scale": (2304, 160),
        "layers.3.ffn.experts.0.w2.weight": (5120, 1152),
        "layers.3.ffn.experts.0.w2.scale": (5120, 72),
        "layers.3.ffn.shared_experts.w2.scale": (160, 72),
        "layers.20.attn.compressor.wkv.weight": (512, 5120),
        "layers.24.attn.indexer.wq_b.scale": (128, 40),
        "layers.14.engram.embed.weight": (384016682, 256),
        "layers.14.engram.embed.scale": (384016682, 8),
        "layers.1.engram.wkv.weight": (25600, 6144),
        "layers.1.engram.wkv.scale": (800, 192),
    }
    assert {name: specs[name].shape for name in published} == published


def test_every_scale_names_its_weight() -> None:
    specs = expected_tensors(ModelConfig.from_directory(TINY))
    quantized = {name for name, spec in specs.items() if spec.storage not in (Storage.PLAIN, Storage.SCALE)}
    assert {spec.scale_of for spec in specs.values() if spec.storage is Storage.SCALE} == quantized
