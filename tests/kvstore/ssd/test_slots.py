"""Slots side by side join into few system calls, never across files."""

from __future__ import annotations

from epdserve.kvstore.ssd.slots import aligned, is_aligned, neighbours


def runs(slots: list[int], *, per_file: int = 10, longest: int = 4) -> list[tuple[int, int, int]]:
    joined = neighbours(slots, slots_per_file=per_file, max_slots=longest)
    return [(slots[run.start] // per_file, slots[run.start] % per_file, len(run)) for run in joined]


def test_neighbours_join() -> None:
    assert runs([1, 2, 3, 7]) == [(0, 1, 3), (0, 7, 1)]


def test_runs_end_with_a_file_and_at_the_longest_transfer() -> None:
    assert runs([8, 9, 10, 11]) == [(0, 8, 2), (1, 0, 2)]
    assert runs([0, 1, 2, 3, 4]) == [(0, 0, 4), (0, 4, 1)]


def test_a_slot_asked_for_twice_is_read_twice() -> None:
    assert runs([5, 5, 6]) == [(0, 5, 1), (0, 5, 2)]


def test_no_slots_is_no_run() -> None:
    assert runs([]) == []


def test_aligned_buffers_are_what_direct_io_wants() -> None:
    buffers = aligned(3, 8192)
    assert buffers.shape == (3, 8192)
    assert all(is_aligned(buffer) for buffer in buffers)
    assert not is_aligned(buffers[0][1:])
    assert aligned(0, 4096).shape == (0, 4096)
