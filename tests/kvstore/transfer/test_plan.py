import numpy as np
import pytest
from epdserve.kvstore.transfer.base import Copy
from epdserve.kvstore.transfer.plan import Spans, batches, coalesce, resolve
from epdserve.kvstore.types import RegionDescriptor
from hypothesis import given
from hypothesis import strategies as st

REMOTE = {
    "pages": RegionDescriptor("pages", 1_000_000, 100, 10),
    "tails": RegionDescriptor("tails", 9000, 50, 2, 1),
}
LOCAL = {
    "pages": RegionDescriptor("pages", 5_000_000, 100, 10, 0),
    "tails": RegionDescriptor("tails", 8000, 50, 2),
}


def page(remote: int, local: int, nbytes: int = 100) -> Copy:
    return Copy("pages", remote, "pages", local, nbytes)


def spans_of(*rows: tuple[int, int, int], devices: tuple[int, int] = (-1, -1)) -> Spans:
    return Spans(*devices, *np.array(rows, np.int64).reshape(-1, 3).T)


def plan(*copies: Copy) -> Spans:
    (spans,) = resolve(copies, REMOTE, LOCAL)
    return coalesce(spans)


def test_places_become_addresses_on_their_devices() -> None:
    spans = resolve([page(3, 4), Copy("tails", 1, "tails", 0, 20), page(1, 1)], REMOTE, LOCAL)
    assert [((each.remote_device, each.local_device), each.rows()) for each in spans] == [
        ((-1, 0), [(1_000_300, 5_000_400, 100), (1_000_100, 5_000_100, 100)]),
        ((1, -1), [(9050, 8000, 20)]),
    ]
    assert resolve([], REMOTE, LOCAL) == []


@pytest.mark.parametrize(
    ("copy", "message"),
    [
        (Copy("nothing", 0, "pages", 0, 1), "no remote region 'nothing'"),
        (Copy("pages", 0, "nothing", 0, 1), "no local region 'nothing'"),
        (page(10, 0), "remote region 'pages' has places 0..9, got 10"),
        (page(-1, 0), "remote region 'pages' has places 0..9, got -1"),
        (page(0, 10), "local region 'pages' has places 0..9, got 10"),
        (page(0, 0, 101), "places of 100 bytes, got 101"),
        (page(0, 0, 0), "places of 100 bytes, got 0"),
        (page(0, 0, -5), "places of 100 bytes, got -5"),
        (Copy("pages", 0, "tails", 0, 51), "local region 'tails' has places of 50 bytes"),
    ],
    ids=str,
)
def test_places_that_do_not_exist_are_refused(copy: Copy, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("..", r"\.\.")):
        resolve([copy], REMOTE, LOCAL)


def test_two_copies_into_one_place_are_refused() -> None:
    with pytest.raises(ValueError, match="two copies"):
        resolve([page(0, 3), page(1, 4), page(2, 3)], REMOTE, LOCAL)
    resolve([page(0, 3), page(0, 4)], REMOTE, LOCAL)  # reading one place twice is fine


def test_neighbours_on_both_sides_become_one_span() -> None:
    spans = plan(page(4, 7), page(2, 5), page(3, 6), page(8, 8))
    assert spans.rows() == [(1_000_200, 5_000_500, 300), (1_000_800, 5_000_800, 100)]


def test_neighbours_on_one_side_only_stay_apart() -> None:
    assert len(plan(page(2, 5), page(3, 7))) == 2
    assert len(plan(page(2, 5), page(4, 6))) == 2
    assert len(plan(page(2, 5, 99), page(3, 6))) == 2  # a byte is left out
    assert len(plan(page(2, 6), page(3, 5))) == 2


def test_spans_on_different_devices_stay_apart() -> None:
    local = {**LOCAL, "tails": RegionDescriptor("tails", 5_001_000, 100, 10, 1)}  # right behind the pages
    spans = resolve([page(0, 9), Copy("pages", 1, "tails", 0, 100)], REMOTE, local)
    assert [(each.local_device, len(coalesce(each))) for each in spans] == [(0, 1), (1, 1)]


def test_batches_keep_to_bytes_and_spans() -> None:
    spans = spans_of((100, 100, 25), (200, 200, 4), (300, 300, 4))
    assert [batch.rows() for batch in batches(spans, max_bytes=10, max_spans=9)] == [
        [(100, 100, 10)],
        [(110, 110, 10)],
        [(120, 120, 5), (200, 200, 4)],
        [(300, 300, 4)],
    ]
    assert [len(batch) for batch in batches(spans, max_bytes=1000, max_spans=1)] == [1, 1, 1]
    assert list(batches(spans_of(), max_bytes=1, max_spans=1)) == []


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 100)), max_size=10),
    st.permutations(range(10)),
    st.integers(1, 250),
    st.integers(1, 4),
)
def test_every_byte_is_copied_once_to_its_place(
    sources: list[tuple[int, int]], targets: list[int], max_bytes: int, max_spans: int
) -> None:
    copies = [page(source, target, size) for (source, size), target in zip(sources, targets, strict=False)]
    remote, local, expected = np.arange(1000), np.full(1000, -1), np.full(1000, -1)
    for copy in copies:
        start, to = copy.remote_index * 100, copy.local_index * 100
        expected[to : to + copy.nbytes] = remote[start : start + copy.nbytes]
    written = 0
    groups = [coalesce(spans) for spans in resolve(copies, REMOTE, LOCAL)]
    for batch in (b for group in groups for b in batches(group, max_bytes=max_bytes, max_spans=max_spans)):
        assert batch.nbytes.sum() <= max_bytes
        assert len(batch) <= max_spans
        for remote_address, local_address, nbytes in batch.rows():
            start, to = remote_address - 1_000_000, local_address - 5_000_000
            local[to : to + nbytes] = remote[start : start + nbytes]
            written += nbytes
    assert (local == expected).all()
    assert written == sum(copy.nbytes for copy in copies)
