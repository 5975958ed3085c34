import json
from pathlib import Path

import pytest
from epdserve.model.config import ModelConfig
from epdserve.model.kv_layout import EntryFormat, KVLayout
from hypothesis import given
from hypothesis import strategies as st
from support.released_config import released_document

GOLDEN = Path(__file__).parents[1] / "golden"
RELEASED = ModelConfig.from_json(released_document())
TINY = ModelConfig.from_directory(GOLDEN / "tiny")
FORMATS = list(EntryFormat)


def packed(config: ModelConfig, block_tokens: int = 128) -> KVLayout:
    return KVLayout.of(config, block_tokens=block_tokens, entry_format=EntryFormat.PACKED)


def test_released_block_has_the_agreed_sizes() -> None:
    layout = packed(RELEASED)
    assert layout.bytes_per_token == 890
    assert layout.payload_bytes == layout.header_offset == 113_920
    assert layout.page_bytes == 114_688
    assert layout.window_row_bytes == 528
    assert [(plane.layer, plane.entries_per_block) for plane in layout.planes] == [
        (2, 64), (8, 64), (14, 64), (20, 128),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "name"), [(RELEASED, "released"), (TINY, "tiny")], ids=["released", "tiny"]
)
def test_cache_arithmetic_equals_the_golden_figures(config: ModelConfig, name: str) -> None:
    golden = json.loads((GOLDEN / "blocks" / "bytes_per_token.json").read_text())[name]
    layout = packed(config)
    plane = layout.planes[0]
    assert plane.main_values_bytes + plane.main_scales_bytes == golden["main_entry_bytes"]
    assert plane.index_values_bytes + plane.index_scales_bytes == golden["index_entry_bytes"]
    assert sum(1 / plane.ratio for plane in layout.planes) == golden["entries_per_token"]
    assert layout.bytes_per_token == golden["bytes_per_token"]
    assert layout.window_row_bytes == golden["window_row_bytes"]


def test_float32_entries_have_no_scales() -> None:
    layout = KVLayout.of(TINY, block_tokens=4, entry_format=EntryFormat.FLOAT32)
    plane = layout.planes[0]
    assert (plane.main_values_bytes, plane.main_scales_bytes) == (256, 0)
    assert (plane.index_values_bytes, plane.index_scales_bytes) == (256, 0)
    assert layout.window_row_bytes == 256


@given(half=st.integers(1, 200), entry_format=st.sampled_from(FORMATS))
def test_parts_tile_the_payload_without_gap_or_overlap(half: int, entry_format: EntryFormat) -> None:
    layout = KVLayout.of(TINY, block_tokens=2 * half, entry_format=entry_format)
    end = 0
    for plane in layout.planes:
        parts = [
            (plane.main_values_offset, plane.main_values_bytes),
            (plane.main_scales_offset, plane.main_scales_bytes),
            (plane.index_values_offset, plane.index_values_bytes),
            (plane.index_scales_offset, plane.index_scales_bytes),
        ]
        for offset, entry_bytes in parts:
            assert offset == end
            end = offset + plane.entries_per_block * entry_bytes
    assert end <= layout.payload_bytes < end + 8
    assert layout.payload_bytes % 8 == 0
    assert layout.page_bytes % 4096 == 0
    assert 0 <= layout.page_bytes - layout.header_offset - 64 < 4096


@pytest.mark.parametrize("block_tokens", [-2, 0, 1, 3, 127])
def test_odd_or_empty_blocks_are_refused(block_tokens: int) -> None:
    with pytest.raises(ValueError, match=str(block_tokens)):
        packed(TINY, block_tokens)


def test_plane_of_a_layer_that_writes_none() -> None:
    layout = packed(RELEASED)
    assert layout.plane_of(14).layer == 14
    with pytest.raises(KeyError):
        layout.plane_of(21)


def test_fingerprint_tells_layouts_apart_and_is_stable() -> None:
    layouts = [
        KVLayout.of(c, block_tokens=b, entry_format=f)
        for c in (TINY, RELEASED)
        for b in (2, 4)
        for f in FORMATS
    ]
    assert len({layout.fingerprint() for layout in layouts}) == len(layouts)
    # Stored bytes outlive a process: this value may only change together with LAYOUT_VERSION.
    assert packed(RELEASED).fingerprint().hex() == "87a133429e7772dc14721e8936a9cceb"
