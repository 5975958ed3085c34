"""Whether pages that a transfer filled hold the blocks that were promised."""

from collections.abc import Sequence

import torch
from epdserve.kvstore.block_header import HEADER_BYTES, encode_header
from epdserve.kvstore.types import BlockHash, PageId
from epdserve.services.engine.runner import Runner
from epdserve.services.types import BlockRef


def wrong_blocks(runner: Runner, pages: Sequence[PageId], refs: Sequence[BlockRef]) -> list[int]:
    """Which of the pages do not hold what their refs promise: all 64 bytes of the header, then the checksum.

    Only reads, so that it may run in any thread.
    """
    if not pages:
        return []
    payload_bytes, at = runner.layout.payload_bytes, runner.layout.header_offset
    found = runner.pools.pages[torch.tensor(pages), at : at + HEADER_BYTES].cpu().numpy().tobytes()
    promised = [
        encode_header(BlockHash(ref.block_hash), ref.checksum, payload_bytes, exact=ref.exact) for ref in refs
    ]
    sums = runner.checksums(pages, [BlockHash(ref.block_hash) for ref in refs])
    if found == b"".join(promised) and sums == [ref.checksum for ref in refs]:
        return []
    return [
        place
        for place, ref in enumerate(refs)
        if found[place * HEADER_BYTES : (place + 1) * HEADER_BYTES] != promised[place]
        or sums[place] != ref.checksum
    ]
