"""Errors of the SSD tier.

KVStoreError
  SsdError
    DirectoryOwned         another process, or another tier of this one, holds the directory
    WrongFormat            the directory was laid out for other blocks or another size
    NoUsableDirectory      not one of the given directories can serve
    DeletionIncomplete     a failed drive may still hold traces of what was deleted

A record that cannot be read or does not verify is a miss; a full or failing disk refuses. Neither is an error.
"""

from __future__ import annotations

from epdserve.kvstore.errors import KVStoreError


# ruff: noqa: N818
class SsdError(KVStoreError):
    """Base of what the SSD tier raises on purpose."""


class DirectoryOwned(SsdError):
    """Somebody else holds the directory's lock file."""

    def __init__(self, folder: str) -> None:
        super().__init__(f"{folder} is owned by another store")
        self.folder = folder


class WrongFormat(SsdError):
    """The directory was laid out otherwise."""

    def __init__(self, folder: str, *, found: object, wanted: object) -> None:
        super().__init__(f"{folder} holds {found!r}, this store needs {wanted!r}")
        self.folder, self.found, self.wanted = folder, found, wanted


class NoUsableDirectory(SsdError):
    """Not one of the given directories can serve. ``reasons`` says why, by directory."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__("; ".join(f"{folder}: {why}" for folder, why in reasons.items()))
        self.reasons = reasons


class DeletionIncomplete(SsdError):
    """Some drives could not be scrubbed: what was deleted may come back with them after a restart.

    Attributes:
        deleted: Stored blocks that are gone from memory and from the drives that serve.
        folders: Directories that may still hold traces.
    """

    def __init__(self, deleted: int, folders: tuple[str, ...]) -> None:
        super().__init__(f"{deleted} blocks deleted, but traces may remain in {', '.join(folders)}")
        self.deleted, self.folders = deleted, folders
