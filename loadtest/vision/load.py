"""Keeps an encode worker busy over its own RPC; started by ``serving``.

    python -m epdserve.loadtest.vision.load ADDRESS TOKEN_FILE

The same pixels under ever new names, so that each is embedded again; more of them at a time than fit one batch.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Final

from epdserve.loadtest.vision.serving import picture_bytes
from epdserve.services.errors import ServiceError
from epdserve.services.image_types import EncodeImage, EncodeJob
from epdserve.services.rpc.encode_client import EncodeClient

_AT_A_TIME: Final = 16
_DEADLINE_S: Final = 60.0
_PAUSE_S: Final = 0.05


async def load(address: str, token: str, tokens: int) -> None:
    """Ask without end."""
    data = picture_bytes(0)
    async with EncodeClient(address, token=token) as client:

        async def ask() -> None:
            while True:
                job = EncodeJob(os.urandom(8).hex(), (EncodeImage(os.urandom(32), tokens, data),))
                try:
                    await client.run(job, deadline_s=_DEADLINE_S)
                except ServiceError as error:
                    # The cache is full of what nobody fetches; it has room again when that is given up
                    print(f"encode: {error}", file=sys.stderr, flush=True)
                    await asyncio.sleep(_PAUSE_S)

        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_A_TIME):
                group.create_task(ask())


if __name__ == "__main__":
    asyncio.run(load(sys.argv[1], Path(sys.argv[2]).read_text().strip(), int(sys.argv[3])))
