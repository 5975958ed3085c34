"""What native.c offers; ``native.py`` says what the functions mean."""

from collections.abc import Sequence
from typing import Final

from typing_extensions import Buffer

VERSION: Final[int]

def copy_pages(targets: Sequence[Buffer], sources: Sequence[Buffer], /) -> None: ...
def crc32c(buffers: Sequence[Buffer], count: int, /) -> list[int]: ...
def seal(bodies: Sequence[Buffer], split: int, ends: Sequence[Buffer], covers: int, /) -> None: ...
def gather(buffers: Sequence[Buffer], offset: int, count: int, /) -> bytes: ...
def aligned(buffers: Sequence[Buffer], boundary: int, /) -> bool: ...

class _Crew: ...
class _Ticket: ...

def crew(threads: int, /) -> _Crew: ...
def stop(crew: _Crew, /) -> None: ...
def begin_write(
    crew: _Crew,
    fds: Sequence[int],
    offsets: Sequence[int],
    counts: Sequence[int],
    bodies: Sequence[Buffer],
    split: int,
    ends: Sequence[Buffer],
    covers: int,
    /,
) -> _Ticket: ...
def begin_read(
    crew: _Crew,
    fds: Sequence[int],
    offsets: Sequence[int],
    counts: Sequence[int],
    pages: Sequence[Buffer],
    covers: int,
    /,
) -> _Ticket: ...
def finish(ticket: _Ticket, /) -> tuple[list[int], list[int]]: ...
