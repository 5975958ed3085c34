import hashlib

import pytest
from epdserve.services.policy.encoding import EncodeLoad, choose_encoder

DIGESTS = [hashlib.sha256(bytes([n])).digest() for n in range(200)]


def idle(*workers: str) -> list[EncodeLoad]:
    return [EncodeLoad(worker, 0) for worker in workers]


def test_every_router_finds_the_same_home_whatever_the_order() -> None:
    for digest in DIGESTS:
        assert choose_encoder(digest, idle("a", "b", "c")) == choose_encoder(digest, idle("c", "a", "b"))


def test_homes_are_spread() -> None:
    homes = [choose_encoder(digest, idle("a", "b", "c")) for digest in DIGESTS]
    assert all(homes.count(worker) > 40 for worker in "abc")


def test_a_worker_that_leaves_moves_only_its_own_images() -> None:
    for digest in DIGESTS:
        home = choose_encoder(digest, idle("a", "b", "c"))
        if home != "c":
            assert choose_encoder(digest, idle("a", "b")) == home


def test_an_image_leaves_a_home_that_is_far_busier() -> None:
    digest = next(d for d in DIGESTS if choose_encoder(d, idle("a", "b")) == "a")
    loads = [EncodeLoad("a", 40_001), EncodeLoad("b", 1)]
    assert choose_encoder(digest, loads, spill_patches=40_000) == "a"
    assert choose_encoder(digest, loads, spill_patches=39_999) == "b"


def test_without_a_worker_there_is_no_choice() -> None:
    with pytest.raises(ValueError, match="no encode worker"):
        choose_encoder(DIGESTS[0], [])
