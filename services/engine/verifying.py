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
    layout = runner.layout
    at = layout.header_offset
    headers = runner.pools.pages[torch.tensor(pages), at : at + HEADER_BYTES].cpu().numpy()
    sums = runner.checksums(pages, [BlockHash(ref.block_hash) for ref in refs])
    wrong = []
    for place, (ref, checksum) in enumerate(zip(refs, sums, strict=True)):
        promised = encode_header(
            BlockHash(ref.block_hash), ref.checksum, layout.payload_bytes, exact=ref.exact
        )
        if headers[place].tobytes() != promised or checksum != ref.checksum:
            wrong.append(place)
    return wrong
