"""Blocks named by paths: one letter a block, so that a path tells its parents."""

from epdserve.kvstore.types import BlockHash


def name(path: str) -> BlockHash:
    """Hash of the block at the end of ``path``: one letter a block."""
    return BlockHash(path.encode().ljust(16, b"."))


def chain(path: str) -> list[BlockHash]:
    """Hashes of all blocks on the way to the end of ``path``."""
    return [name(path[: end + 1]) for end in range(len(path))]


def parent_of(path: str) -> BlockHash | None:
    """Hash of the block before the last, None for a first block."""
    return name(path[:-1]) if len(path) > 1 else None
