import time
from collections.abc import Callable

import numpy as np
import pytest
from epdserve.kvstore.hashing import ImageDigest, TokenIds, cache_root, prefix_hash_chain, tenant_label
from epdserve.kvstore.types import BlockHash
from hypothesis import given
from hypothesis import strategies as st

ROOT = b"r" * 32
KEY = b"k" * 32
TOKENS = list(range(64))


def chain(
    tokens: TokenIds = TOKENS,
    *,
    block_tokens: int = 8,
    root: bytes = ROOT,
    tenant_key: bytes = KEY,
    image_digests: tuple[ImageDigest, ...] = (),
) -> list[BlockHash]:
    return prefix_hash_chain(
        tokens, block_tokens=block_tokens, root=root, tenant_key=tenant_key, image_digests=image_digests
    )


def image(first_token: int = 9, num_tokens: int = 4, fill: bytes = b"a") -> ImageDigest:
    return ImageDigest(first_token, num_tokens, fill * 32)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (7, 0), (8, 1), (9, 1), (15, 1), (16, 2)])
def test_only_full_blocks_are_named(tokens: int, blocks: int) -> None:
    assert len(chain(list(range(tokens)))) == blocks


def test_hashes_are_sixteen_bytes_and_all_differ() -> None:
    hashes = chain([7] * 64)  # the same tokens in every block: only the position differs
    assert {len(block_hash) for block_hash in hashes} == {16}
    assert len(set(hashes)) == 8


def test_lists_and_arrays_of_any_integer_type_give_the_same_chain() -> None:
    expected = chain(TOKENS)
    for dtype in (np.int64, np.int32, np.uint32, np.uint16):
        assert chain(np.array(TOKENS, dtype=dtype)) == expected
    assert chain(np.array(TOKENS * 2)[::2][: len(TOKENS)]) != expected
    strided = np.repeat(np.array(TOKENS), 2)[::2]
    assert chain(strided) == expected


@given(st.integers(0, 63), st.integers(0, 2**32 - 1))
def test_a_changed_token_changes_its_block_and_all_after_it(position: int, token: int) -> None:
    changed = [*TOKENS[:position], token, *TOKENS[position + 1 :]]
    same = [a == b for a, b in zip(chain(), chain(changed), strict=True)]
    first = 8 if token == TOKENS[position] else position // 8
    assert same == [block < first for block in range(8)]


@pytest.mark.parametrize(
    "other",
    [
        lambda: chain(tenant_key=b"l" * 32),
        lambda: chain(root=b"s" * 32),
        lambda: chain(root=ROOT + b"\0"),
        lambda: chain(TOKENS[8:] + TOKENS[:8]),
        lambda: chain(block_tokens=4)[1::2],
        lambda: chain(image_digests=(image(first_token=0),)),
    ],
    ids=["tenant", "root", "longer_root", "order", "block_length", "image"],
)
def test_nothing_is_shared_across(other: Callable[[], list[BlockHash]]) -> None:
    assert not set(chain()) & set(other())


def test_an_image_counts_from_the_first_block_it_touches() -> None:
    plain, with_image = chain(), chain(image_digests=(image(first_token=9),))
    assert plain[0] == with_image[0]
    assert not set(plain[1:]) & set(with_image)


def test_images_differ_by_bytes_place_length_and_order() -> None:
    one, two = image(9, 4, b"a"), image(20, 4, b"b")
    variants = [
        (one, two),
        (image(9, 4, b"b"), image(20, 4, b"a")),
        (image(10, 4, b"a"), two),
        (image(9, 5, b"a"), two),
        (one,),
    ]
    assert len({chain(image_digests=images)[-1] for images in variants}) == len(variants)


def test_an_image_over_several_blocks_marks_each_of_them() -> None:
    # the second block holds placeholder tokens only: without the digest it would look the same for any image
    tokens = [1] * 32
    first, second = (chain(tokens, image_digests=(ImageDigest(0, 32, fill * 32),)) for fill in (b"a", b"b"))
    assert not set(first) & set(second)


def test_an_image_beyond_the_last_full_block_is_left_out() -> None:
    tokens = TOKENS[:12]
    assert chain(tokens, image_digests=(image(first_token=9, num_tokens=2),)) == chain(tokens)


@pytest.mark.parametrize(
    "call",
    [
        lambda: chain([-1] * 8),
        lambda: chain([2**32] * 8),
        lambda: chain(np.ones(8, np.float32)),  # type: ignore[arg-type]
        lambda: chain(np.ones((8, 8), np.int64)),
        lambda: chain(tenant_key=b""),
        lambda: chain(tenant_key=b"k" * 65),
        lambda: chain(block_tokens=0),
        lambda: ImageDigest(0, 1, b"short"),
        lambda: ImageDigest(-1, 1, b"d" * 32),
        lambda: ImageDigest(0, 0, b"d" * 32),
    ],
    ids=[
        "negative-id",
        "wide-id",
        "fractions",
        "two-axes",
        "no-key",
        "long-key",
        "no-block",
        "short-digest",
        "negative-place",
        "no-tokens",
    ],
)
def test_nonsense_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"token|tenant_key|block_tokens|image"):
        call()


def root(**changes: object) -> bytes:
    fields: dict[str, object] = {
        "weights_fingerprint": b"w" * 32,
        "layout_fingerprint": b"l" * 32,
        "number_format": "f32q",
        "backend": "cpu",
        "deterministic": False,
    }
    return cache_root(**{**fields, **changes})  # type: ignore[arg-type]


def test_every_field_of_the_root_counts_and_none_runs_into_the_next() -> None:
    roots = [
        root(),
        root(weights_fingerprint=b"v" * 32),
        root(layout_fingerprint=b"m" * 32),
        root(number_format="bf16q"),
        root(backend="cuda"),
        root(deterministic=True),
        root(number_format="f32qc", backend="pu"),
        root(weights_fingerprint=b"w" * 31, layout_fingerprint=b"w" + b"l" * 32),
    ]
    assert len(set(roots)) == len(roots)
    assert root() == root()
    assert len(root()) == 32


def test_a_tenants_label_is_of_the_first_part_of_its_key() -> None:
    label = tenant_label(b"t" * 16)
    assert label == tenant_label(b"t" * 16 + b"a user") == tenant_label(b"t" * 16 + b"another")
    assert len({label, tenant_label(b"t" * 15), tenant_label(b"u" + b"t" * 15)}) == 3
    assert len(label) == 16
    assert label != b"t" * 16


def test_chain_is_stable_over_releases() -> None:
    # these bytes name blocks that outlive the process: a change needs a new CHAIN_VERSION
    assert chain()[0].hex() == "1c5c331b41506f81056654f7334c37dc"
    assert chain()[-1].hex() == "1f7263dc8e8edbd2a6a9aa915577e9ca"
    assert root().hex() == "abf7a56624f1c894a70d77820c31c99e621f45009719b49cb16b5677b8d8e579"


def test_hashing_a_long_prompt_is_quick(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = np.arange(100_000) % 129_280
    best = min(_timed(tokens) for _ in range(3))
    with capsys.disabled():
        print(f"\n100k tokens hashed in {1e3 * best:.1f} ms")


def _timed(tokens: TokenIds) -> float:
    started_at = time.perf_counter()
    prefix_hash_chain(tokens, block_tokens=128, root=ROOT, tenant_key=KEY)
    return time.perf_counter() - started_at
