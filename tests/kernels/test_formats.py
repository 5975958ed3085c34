import json

import pytest
from epdserve.kernels.formats import INDEXER_K, MAIN_KV, SWA_KV, EntryFormat
from support.kernel_rows import BLOCKS

SIZES = json.loads((BLOCKS / "bytes_per_token.json").read_text())


@pytest.mark.parametrize(("name", "latent", "index"), [("released", 512, 128), ("tiny", 64, 64)])
def test_entry_bytes_are_the_golden_numbers(name: str, latent: int, index: int) -> None:
    sizes = SIZES[name]
    assert MAIN_KV.entry_bytes(latent) == sizes["main_entry_bytes"]
    assert INDEXER_K.entry_bytes(index) == sizes["index_entry_bytes"]
    assert SWA_KV.entry_bytes(latent) == sizes["window_row_bytes"]
    per_token = sizes["entries_per_token"] * (MAIN_KV.entry_bytes(latent) + INDEXER_K.entry_bytes(index))
    assert per_token == sizes["bytes_per_token"]


def test_values_and_scales_add_up_to_the_entry() -> None:
    assert (MAIN_KV.value_bytes(512), MAIN_KV.scale_bytes(512)) == (256, 32)
    assert (INDEXER_K.value_bytes(128), INDEXER_K.scale_bytes(128)) == (64, 4)
    assert (SWA_KV.value_bytes(512), SWA_KV.scale_bytes(512)) == (512, 16)


@pytest.mark.parametrize("channels", [0, -16, 15, 24])
def test_channels_that_fill_no_whole_scale_are_refused(channels: int) -> None:
    with pytest.raises(ValueError, match=str(channels)):
        MAIN_KV.entry_bytes(channels)


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="6 bits"):
        EntryFormat(value_bits=6, channels_per_scale=16)
