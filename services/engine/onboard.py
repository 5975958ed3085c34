"""How a request that starts from its token ids gets a place: prefix hit, pages, state slot."""

from collections.abc import Sequence

from epdserve.kvstore.errors import OutOfPages
from epdserve.kvstore.types import BlockHash, PageId
from epdserve.model.replay import plan_prefill, usable_hit
from epdserve.services.engine.requests import RunningRequest
from epdserve.services.engine.runner import Runner


def onboard(runner: Runner, request: RunningRequest) -> bool:
    """Give ``request`` what it needs to run all of its known tokens; False, and no change, if there is no room.

    The longest prefix found in this worker's pages is used if it is worth it: it ends on a block boundary, exceeds one
    window, and leaves at least one token to compute. Its last window is replayed, so what follows it is tainted. Exact
    requests take no hit, as there is no tail to resume from.
    """
    if not request.exact and not request.hashes:
        request.hashes = runner.names.chain(request.known, request.tenant_key)
    hashes = [] if request.exact else request.hashes[: request.prompt_tokens // runner.block_tokens]
    needed = -(-request.length // runner.block_tokens)
    if needed - runner.blocks.peek(hashes) > runner.blocks.available():
        return False  # the usual answer while the worker is full: no reference is taken for it
    slot = runner.state_slots.acquire()
    if slot is None:
        return False
    found = _match(runner, request, hashes)
    try:
        fresh = runner.blocks.reserve(needed - len(found))
    except OutOfPages:
        runner.blocks.release(found)
        runner.state_slots.release(slot)
        return False
    hit = len(found) * runner.block_tokens
    request.slot, request.pages, request.sealed_blocks = slot, found + fresh, len(found)
    request.span = plan_prefill(
        prompt_tokens=request.prompt_tokens,
        hit_tokens=hit,
        window=runner.window,
        slack=runner.slack,
        exact=request.exact,
    )
    request.next_row, request.tainted_from = request.span.first_row, hit or None
    request.private = False
    return True


def _match(runner: Runner, request: RunningRequest, hashes: Sequence[BlockHash]) -> list[PageId]:
    """Pages of a hit worth using, referenced."""
    pages = runner.blocks.match(hashes, exact=False)
    hit = usable_hit(
        len(pages) * runner.block_tokens,
        prompt_tokens=request.prompt_tokens,
        window=runner.window,
        block_tokens=runner.block_tokens,
        has_tail=False,
    )
    used = hit // runner.block_tokens
    runner.blocks.release(pages[used:])
    return pages[:used]
