"""Images and embeddings to protobuf and back; the rules are those of ``rpc.convert``."""

from __future__ import annotations

from collections.abc import Iterable

from epdserve.services.errors import InvalidRequest
from epdserve.services.image_types import (
    DIGEST_BYTES,
    EmbeddingWish,
    EncodeImage,
    EncodeJob,
    EncodeResult,
    LentEmbeddings,
    PlacedImage,
)
from epdserve.services.rpc.pb import common_pb2, encode_pb2


def job_to_pb(job: EncodeJob) -> encode_pb2.EncodeJob:
    """A job as a message."""
    images = [
        encode_pb2.EncodeImage(digest=image.digest, tokens=image.tokens, data=image.data)
        for image in job.images
    ]
    return encode_pb2.EncodeJob(request_id=job.request_id, images=images, trace=job.trace)


def job_from_pb(pb: encode_pb2.EncodeJob) -> EncodeJob:
    """The job of a message."""
    return EncodeJob(
        pb.request_id,
        tuple(EncodeImage(_digest(image.digest), image.tokens, image.data) for image in pb.images),
        pb.trace,
    )


def result_to_pb(result: EncodeResult) -> encode_pb2.EncodeResult:
    """A result as a message."""
    return encode_pb2.EncodeResult(hits=result.hits, missing=result.missing)


def result_from_pb(pb: encode_pb2.EncodeResult) -> EncodeResult:
    """The result of a message."""
    return EncodeResult(pb.hits, tuple(pb.missing))


def wish_to_pb(wish: EmbeddingWish) -> encode_pb2.EmbeddingWish:
    """A wish as a message."""
    return encode_pb2.EmbeddingWish(digest=wish.digest, tokens=wish.tokens, fingerprint=wish.fingerprint)


def wish_from_pb(pb: encode_pb2.EmbeddingWish) -> EmbeddingWish:
    """The wish of a message."""
    return EmbeddingWish(_digest(pb.digest), pb.tokens, pb.fingerprint)


def lent_to_pb(lent: LentEmbeddings) -> encode_pb2.LentEmbeddings:
    """What is lent, as a message."""
    return encode_pb2.LentEmbeddings(
        lease=lent.lease,
        incarnation=lent.incarnation,
        slots=lent.slots,
        nbytes=lent.nbytes,
        checksums=lent.checksums,
    )


def lent_from_pb(pb: encode_pb2.LentEmbeddings) -> LentEmbeddings:
    """What a message lends."""
    if len(pb.slots) != len(pb.checksums):
        raise InvalidRequest(f"{len(pb.slots)} slots with {len(pb.checksums)} checksums")
    return LentEmbeddings(pb.lease, pb.incarnation, tuple(pb.slots), pb.nbytes, tuple(pb.checksums))


def placed_to_pb(images: tuple[PlacedImage, ...]) -> list[common_pb2.PlacedImage]:
    """The images of a prompt as messages."""
    return [
        common_pb2.PlacedImage(
            first_token=image.first_token,
            tokens=image.tokens,
            digest=image.digest,
            encoder=image.encoder,
            incarnation=image.incarnation,
        )
        for image in images
    ]


def placed_from_pb(images: Iterable[common_pb2.PlacedImage]) -> tuple[PlacedImage, ...]:
    """The images of a prompt's messages."""
    try:
        return tuple(
            PlacedImage(image.first_token, image.tokens, image.digest, image.encoder, image.incarnation)
            for image in images
        )
    except ValueError as error:
        raise InvalidRequest(str(error), param="images") from error


def _digest(digest: bytes) -> bytes:
    if len(digest) != DIGEST_BYTES:
        raise InvalidRequest(f"an image's digest has {DIGEST_BYTES} bytes, got {len(digest)}", param="images")
    return digest
