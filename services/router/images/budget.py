"""Bytes that the images of one request may still bring, counted while they come."""

from __future__ import annotations

from epdserve.services.errors import PayloadTooLarge


class BytesLeft:
    """Shared by all fetches of a request, so that many images within their own limit cannot fill the memory.

    Owned by one event loop.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._left = nbytes, nbytes

    def take(self, nbytes: int) -> None:
        """Count bytes that have arrived, or are about to be unpacked.

        Raises:
            PayloadTooLarge: There were fewer left.
        """
        if nbytes > self._left:
            raise PayloadTooLarge(
                f"the images have more than the {self._nbytes} bytes together that are taken"
            )
        self._left -= nbytes
