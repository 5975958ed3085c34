"""What native.c offers; ``native.py`` says what the functions mean."""

from collections.abc import Sequence
from typing import Final

from typing_extensions import Buffer

VERSION: Final[int]

def copy_pages(targets: Sequence[Buffer], sources: Sequence[Buffer], /) -> None: ...
def crc32c(buffers: Sequence[Buffer], count: int, /) -> list[int]: ...
def seal(bodies: Sequence[Buffer], split: int, ends: Sequence[Buffer], covers: int, /) -> None: ...
