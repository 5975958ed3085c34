import pytest
from epdserve.services.errors import InvalidRequest
from epdserve.services.image_types import (
    EmbeddingWish,
    EncodeImage,
    EncodeJob,
    EncodeResult,
    LentEmbeddings,
    PlacedImage,
)
from epdserve.services.rpc import convert_encode as convert
from epdserve.services.rpc.pb import common_pb2, encode_pb2

DIGEST = bytes(range(32))


def test_what_comes_back_is_what_went_in() -> None:
    job = EncodeJob("r", (EncodeImage(DIGEST, 7, b"file"), EncodeImage(bytes(32), 3)))
    assert convert.job_from_pb(convert.job_to_pb(job)) == job
    result = EncodeResult(2, (DIGEST,))
    assert convert.result_from_pb(convert.result_to_pb(result)) == result
    wish = EmbeddingWish(DIGEST, 9, b"f" * 16)
    assert convert.wish_from_pb(convert.wish_to_pb(wish)) == wish
    lent = LentEmbeddings("lease", "7", (3, 1), 4096, (2**64 - 1, 0))
    assert convert.lent_from_pb(convert.lent_to_pb(lent)) == lent
    placed = (PlacedImage(4, 5, DIGEST, "encode-0", "7"), PlacedImage(2**33, 1, bytes(32)))
    assert convert.placed_from_pb(convert.placed_to_pb(placed)) == placed


def test_messages_that_no_version_writes_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="32 bytes"):
        convert.job_from_pb(encode_pb2.EncodeJob(images=[encode_pb2.EncodeImage(digest=b"x", tokens=1)]))
    with pytest.raises(InvalidRequest, match="32 bytes"):
        convert.wish_from_pb(encode_pb2.EmbeddingWish(digest=b"", tokens=1))
    with pytest.raises(InvalidRequest, match="checksums"):
        convert.lent_from_pb(encode_pb2.LentEmbeddings(slots=[1], checksums=[]))
    with pytest.raises(InvalidRequest, match="impossible image"):
        convert.placed_from_pb([common_pb2.PlacedImage(first_token=0, tokens=0, digest=DIGEST)])
