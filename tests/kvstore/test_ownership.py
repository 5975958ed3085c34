"""Pages recycled under their readers, a million times in a made-up world: no wrong byte is accepted."""

from collections.abc import Callable

import pytest
from support import ownership_world
from support.ownership_world import Tally, World


def require_sound(tally: Tally) -> None:
    assert tally.accepted_wrong == 0
    assert tally.spoiled_later == 0


def test_no_wrong_byte_is_accepted_where_lesser_readers_take_many() -> None:
    tally = World(seed=1).run(recycles=8_000)
    require_sound(tally)
    assert tally.accepted > 500  # it is not refusing everything
    assert tally.under_a_transfer > 500
    assert tally.late_pieces > 100
    assert min(tally.wrong_by.values()) > 0
    assert len(tally.wrong_by) == 3


def test_the_world_notices_a_reader_that_believes_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checksum torn pages pass: the faults are real."""
    monkeypatch.setattr(ownership_world, "verify_block", _header_only)
    assert World(seed=1).run(recycles=8_000).accepted_wrong > 0


def test_the_world_notices_a_reader_that_reuses_pages_of_late_transfers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(seed=1)
    aborted: Callable[[list[int]], None] = world.target.abort  # type: ignore[assignment]
    monkeypatch.setattr(world.target, "quarantine", aborted)
    monkeypatch.setattr(world.target, "transfer_over", lambda pages: None)
    assert world.run(recycles=8_000).spoiled_later > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_quarter_of_a_million_recycles(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    tally = World(seed=100 + seed).run(recycles=250_000)
    with capsys.disabled():
        print(f"\n{tally}")
    require_sound(tally)


def _header_only(page: memoryview, expected: ownership_world.BlockHeader, checksum: object) -> None:
    end = expected.payload_bytes
    expected.verify(page[end : end + ownership_world.HEADER_BYTES])
