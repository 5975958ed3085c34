from __future__ import annotations

import pytest
from epdserve.kvstore.block_index import BlockIndex
from epdserve.kvstore.set_digest import DIGEST_BYTES, set_digest
from epdserve.kvstore.types import BlockEvents, BlockHash
from hypothesis import given
from hypothesis import strategies as st

hashes = st.binary(min_size=16, max_size=16).map(BlockHash)
sets = st.sets(hashes, max_size=20)


@given(sets, sets, sets)
def test_an_index_has_the_digest_of_what_it_was_told(
    first: set[BlockHash], added: set[BlockHash], removed: set[BlockHash]
) -> None:
    index = BlockIndex()
    index.load_snapshot("other", 0, sorted(added))
    index.load_snapshot("w", 0, sorted(first))
    assert index.digest("w") == set_digest(sorted(first))
    gone = removed - added
    index.apply("w", BlockEvents(0, tuple(added), tuple(gone)))
    assert index.digest("w") == set_digest(sorted((first | added) - gone))
    assert index.digest("other") == set_digest(sorted(added))
    index.forget("w")
    assert index.digest("w") is None


@given(sets, sets)
def test_sets_that_differ_have_other_digests(one: set[BlockHash], other: set[BlockHash]) -> None:
    assert (set_digest(sorted(one)) == set_digest(sorted(other, reverse=True))) == (one == other)


def test_a_digest_has_one_size_and_wants_whole_hashes() -> None:
    assert len(set_digest([])) == len(set_digest([BlockHash(b"x" * 16)])) == DIGEST_BYTES
    with pytest.raises(ValueError, match="16 bytes"):
        set_digest([BlockHash(b"short")])
