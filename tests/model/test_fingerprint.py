import json
import os
import time
from pathlib import Path

import pytest
import torch
from epdserve.model.config import ModelConfig
from epdserve.model.fingerprint import (
    SIDECAR_FILE,
    Fingerprinter,
    ShardStamp,
    model_fingerprint,
    read_sidecar,
    stamp_shards,
    write_sidecar,
)
from support.released_config import released_document

FINGERPRINT = bytes(range(16))
STAMPS: list[ShardStamp] = [("a.safetensors", 100, 1_700_000_000_000_000_000)]


def fingerprint_of(tensors: dict[str, torch.Tensor]) -> bytes:
    state = Fingerprinter()
    for name, tensor in tensors.items():
        state.add(name, tensor)
    return state.fingerprint()


def test_order_of_arrival_does_not_matter() -> None:
    a, b = torch.arange(4.0), torch.arange(3)
    assert fingerprint_of({"a": a, "b": b}) == fingerprint_of({"b": b, "a": a})


@pytest.mark.parametrize(
    "changed",
    [
        {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([3.0, 4.0])},
        {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0, 2.0])},  # swapped
        {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3.0, 4.0])},
        {"a": torch.tensor([1.0, 2.0]).view(torch.int32), "b": torch.tensor([3.0, 4.0])},
        {"c": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])},
        {"a": torch.tensor([1.0, 2.0])},
        {},
    ],
    ids=["value", "swap", "shape", "dtype", "name", "missing", "empty"],
)
def test_any_difference_changes_it(changed: dict[str, torch.Tensor]) -> None:
    same = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])}
    assert fingerprint_of(changed) != fingerprint_of(same)


def test_sign_of_zero_and_narrow_formats_are_told_apart() -> None:
    zero = torch.zeros(2, dtype=torch.bfloat16)
    assert fingerprint_of({"a": zero}) != fingerprint_of({"a": -zero})
    codes = torch.zeros(2, dtype=torch.uint8)
    e4m3, e8m0 = codes.view(torch.float8_e4m3fn), codes.view(torch.float8_e8m0fnu)
    assert fingerprint_of({"a": e4m3}) != fingerprint_of({"a": e8m0})


def test_sidecar_is_believed_for_the_shards_it_was_written_for(tmp_path: Path) -> None:
    assert read_sidecar(tmp_path, STAMPS) is None
    assert write_sidecar(tmp_path, STAMPS, FINGERPRINT)
    assert read_sidecar(tmp_path, STAMPS) == FINGERPRINT
    assert [path.name for path in tmp_path.iterdir()] == [SIDECAR_FILE]


@pytest.mark.parametrize(
    "stamps",
    [
        [("a.safetensors", 101, STAMPS[0][2])],
        [("a.safetensors", 100, STAMPS[0][2] + 1)],
        [("b.safetensors", 100, STAMPS[0][2])],
        [*STAMPS, ("b.safetensors", 100, STAMPS[0][2])],
    ],
    ids=["size", "mtime", "name", "number"],
)
def test_stale_sidecar_is_ignored(tmp_path: Path, stamps: list[ShardStamp]) -> None:
    write_sidecar(tmp_path, STAMPS, FINGERPRINT)
    assert read_sidecar(tmp_path, stamps) is None


def test_tampered_sidecar_is_ignored(tmp_path: Path) -> None:
    write_sidecar(tmp_path, STAMPS, FINGERPRINT)
    document = json.loads((tmp_path / SIDECAR_FILE).read_text())
    document["fingerprint"] = "00" * 16
    (tmp_path / SIDECAR_FILE).write_text(json.dumps(document))
    assert read_sidecar(tmp_path, STAMPS) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"fingerprint": 1}', b"\xff\xff"])
def test_garbled_sidecar_is_ignored(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SIDECAR_FILE).write_bytes(content)
    assert read_sidecar(tmp_path, STAMPS) is None


def test_shards_that_may_still_change_unseen_are_not_remembered(tmp_path: Path) -> None:
    assert not write_sidecar(tmp_path, [("a.safetensors", 100, time.time_ns())], FINGERPRINT)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    assert not write_sidecar(tmp_path / "absent", STAMPS, FINGERPRINT)


def test_stamps_are_sorted_by_name(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).write_bytes(b"123")
        os.utime(tmp_path / name, ns=(5, 7))
    assert stamp_shards([tmp_path / "b", tmp_path / "a"]) == [("a", 3, 7), ("b", 3, 7)]


def test_model_identity_depends_on_config_and_token_map(tmp_path: Path) -> None:
    config = ModelConfig.from_json(released_document())
    other = ModelConfig.from_json(released_document(compress_rope_theta=160001))
    bare = model_fingerprint(FINGERPRINT, config, tmp_path)
    assert model_fingerprint(FINGERPRINT, other, tmp_path) != bare
    assert model_fingerprint(bytes(16), config, tmp_path) != bare
    (tmp_path / "tokenizer.json").write_text("{}")
    with_tokenizer = model_fingerprint(FINGERPRINT, config, tmp_path)
    assert with_tokenizer != bare
    (tmp_path / "compressed_token_map.json").write_text("[]")
    assert model_fingerprint(FINGERPRINT, config, tmp_path) not in {bare, with_tokenizer}
