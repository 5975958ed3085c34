"""Checksums: what they must notice, and that torch and numpy agree."""

import numpy as np
import pytest
import torch
from epdserve.kernels.checksum import checksum_weights, page_checksums, page_checksums_numpy
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

HASH = bytes(range(16))
WORDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)


def page_of(words: list[int]) -> Tensor:
    return torch.from_numpy(np.array(words, dtype="<u4").view(np.uint8).copy()).unsqueeze(0)


def checksum(page: Tensor, payload_bytes: int | None = None, block_hash: bytes = HASH) -> int:
    (value,) = page_checksums(page, [0], payload_bytes or page.shape[1], [block_hash])
    return value


@given(WORDS, st.data())
def test_any_flipped_bit_is_noticed(words: list[int], data: st.DataObject) -> None:
    page = page_of(words)
    bit = data.draw(st.integers(0, page.numel() * 8 - 1))
    damaged = page.clone()
    damaged[0, bit // 8] ^= 1 << (bit % 8)
    assert checksum(damaged) != checksum(page)


@given(WORDS, st.data())
def test_any_two_swapped_words_are_noticed(words: list[int], data: st.DataObject) -> None:
    i = data.draw(st.integers(0, len(words) - 1))
    j = data.draw(st.integers(0, len(words) - 1))
    assume(words[i] != words[j])
    swapped = list(words)
    swapped[i], swapped[j] = words[j], words[i]
    assert checksum(page_of(swapped)) != checksum(page_of(words))


@pytest.mark.parametrize("high", [0x80000000, 0xFFFFFFFF, 1])
def test_swapped_words_that_differ_in_one_bit_are_noticed_anywhere_in_a_large_page(high: int) -> None:
    """Differences of a high power of two are the ones that a plain sum of 64-bit words misses."""
    words = [0] * 28_480
    values = set()
    for place in (0, 1, 2, 3, 4, 1023, 1024, 8191, 8192, 16384, 28_479):
        words[place] = high
        values.add(checksum(page_of(words)))
        words[place] = 0
    assert len(values) == 11


@given(WORDS)
def test_swapped_eight_byte_words_are_noticed(words: list[int]) -> None:
    words = words[: len(words) // 4 * 4]
    half = len(words) // 2
    assume(words[:half] != words[half:])
    assert checksum(page_of(words[half:] + words[:half])) != checksum(page_of(words))


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=4), st.data())
def test_numpy_gives_the_same_numbers(payloads: list[bytes], data: st.DataObject) -> None:
    width = max(len(payload) for payload in payloads)
    rows = np.stack([np.frombuffer(payload.ljust(width, b"\0"), dtype=np.uint8) for payload in payloads])
    payload_bytes = data.draw(st.integers(0, width))
    ids = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=5))
    hashes = data.draw(st.lists(st.binary(min_size=16, max_size=16), min_size=len(ids), max_size=len(ids)))
    in_torch = page_checksums(torch.from_numpy(rows.copy()), ids, payload_bytes, hashes)
    assert page_checksums_numpy(rows, ids, payload_bytes, hashes) == in_torch
    assert all(0 <= value < 1 << 64 for value in in_torch)


def test_it_is_the_formula_in_plain_integers() -> None:
    words = [0x80000001, 5, 0xFFFFFFFF, 7]
    weights = checksum_weights(4).tolist()
    signed = [word - (1 << 32) if word >> 31 else word for word in words]
    total = sum(word * weight for word, weight in zip(signed, weights, strict=True))
    empty = checksum(page_of([0, 0, 0, 0]))
    assert (checksum(page_of(words)) - empty) % (1 << 64) == total % (1 << 64)


def test_length_hash_and_nothing_past_the_payload_count() -> None:
    page = page_of([1, 2, 3, 0])
    assert checksum(page, 12) != checksum(page, 16)
    assert checksum(page, block_hash=HASH[::-1]) != checksum(page)
    other = page.clone()
    other[0, 12:] = 9
    assert checksum(other, 12) == checksum(page, 12)


def test_a_ragged_payload_is_padded_with_zeros() -> None:
    page = page_of([1, 2, 3, 4])
    ragged = page.clone()
    ragged[0, 10:] = 0
    assert checksum(page, 10) == checksum(ragged, 10)
    ragged[0, 9] ^= 1
    assert checksum(page, 10) != checksum(ragged, 10)


def test_weights_are_odd_distinct_in_their_low_bits_and_a_prefix_of_longer_lists() -> None:
    weights = checksum_weights(100_000)
    assert bool((weights & 1).all())
    assert len((weights & ((1 << 33) - 1)).unique()) == 100_000
    assert torch.equal(checksum_weights(77), weights[:77])
    assert checksum_weights(0).shape == (0,)


def test_a_hash_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="15"):
        checksum(page_of([1]), block_hash=HASH[:15])
