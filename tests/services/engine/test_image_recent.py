import torch
from epdserve.services.engine.image_recent import RecentEmbeddings


def rows(tokens: int, fill: float = 0.0) -> torch.Tensor:
    return torch.full((tokens, 8), fill, dtype=torch.bfloat16)  # 16 bytes a token


def test_what_was_used_longest_ago_goes_first() -> None:
    recent = RecentEmbeddings(64)
    recent.put(b"a", rows(2))
    recent.put(b"b", rows(2))
    assert recent.get(b"a", 2) is not None
    recent.put(b"c", rows(1))
    assert recent.get(b"b", 2) is None
    assert recent.get(b"a", 2) is not None
    assert recent.nbytes == 48


def test_another_length_is_another_image() -> None:
    recent = RecentEmbeddings(64)
    recent.put(b"a", rows(2))
    assert recent.get(b"a", 3) is None


def test_the_bound_holds_for_single_images_and_for_the_same_one_twice() -> None:
    recent = RecentEmbeddings(64)
    recent.put(b"a", rows(5))
    assert recent.get(b"a", 5) is None
    recent.put(b"a", rows(3, 1.0))
    recent.put(b"a", rows(3, 2.0))
    found = recent.get(b"a", 3)
    assert found is not None
    assert float(found[0, 0]) == 2.0
    assert recent.nbytes == 48
    assert RecentEmbeddings(0).get(b"a", 3) is None
