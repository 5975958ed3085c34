from collections.abc import Sequence
from typing import Final

from typing_extensions import Buffer

VERSION: Final[int]
KERNEL: Final[str]

def page_sums(
    pages: Buffer,
    stride: int,
    ids: Sequence[int],
    payload_bytes: int,
    hashes: Sequence[bytes],
    weights: Buffer,
    /,
) -> list[int]: ...
def copy_sums(
    targets: Sequence[Buffer] | None,
    sources: Sequence[Buffer],
    payload_bytes: int,
    hashes: Sequence[bytes],
    weights: Buffer,
    /,
) -> list[int]: ...
