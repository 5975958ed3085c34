import pytest
from epdserve.kvstore.types import BlockGeometry, Conservation, MemoryRegion, RegionDescriptor


@pytest.mark.parametrize(
    "wrong",
    [{"tokens": 0}, {"payload_bytes": 0}, {"page_bytes": 113_920}],
    ids=["no_tokens", "no_payload", "no_room_for_the_header"],
)
def test_impossible_block_geometry_is_refused(wrong: dict[str, int]) -> None:
    sizes = {"tokens": 128, "payload_bytes": 113_920, "page_bytes": 114_688}
    BlockGeometry(**sizes)
    with pytest.raises(ValueError, match="impossible block geometry"):
        BlockGeometry(**{**sizes, **wrong})


@pytest.mark.parametrize(
    "wrong", [{"name": ""}, {"address": 0}, {"stride": 0}, {"count": 0}, {"device_id": -2}], ids=str
)
def test_impossible_region_is_refused(wrong: dict[str, int | str]) -> None:
    with pytest.raises(ValueError, match="memory"):
        MemoryRegion(**{"name": "pages", "address": 4096, "stride": 64, "count": 2, **wrong})  # type: ignore[arg-type]


def test_descriptor_of_a_region_is_what_a_peer_may_know() -> None:
    region = MemoryRegion("pages", 4096, 64, 3, 1)
    descriptor = region.descriptor()
    assert type(descriptor) is RegionDescriptor
    assert (descriptor.name, descriptor.address, descriptor.nbytes, descriptor.device_id) == (
        "pages",
        4096,
        192,
        1,
    )


def test_missing_pages_are_those_in_no_phase() -> None:
    assert Conservation(1, 2, 3, 4, 5, total=15).missing == 0
    assert Conservation(1, 2, 3, 4, 5, total=16).missing == 1
