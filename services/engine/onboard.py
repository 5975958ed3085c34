"""How a request that starts from its token ids gets a place: prefix hit, tail, pages, state slot."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from epdserve.kvstore.errors import OutOfPages
from epdserve.kvstore.types import BlockHash, PageId
from epdserve.model.errors import TailError
from epdserve.model.replay import PrefillSpan, plan_prefill, usable_hit
from epdserve.services.engine.requests import RunningRequest
from epdserve.services.engine.runner import Runner

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class FoundTail:
    """A tail of a prompt's prefix, from wherever it was kept.

    Attributes:
        position: Tokens that it covers together with the full blocks before it.
        record_B: (tail bytes,) uint8 host memory; verified when it is restored and not before.
        checksum: Promised by whoever kept it.
        exact: No encoder replay is upstream of it; promised likewise.
    """

    position: int
    record_B: torch.Tensor
    checksum: int
    exact: bool


@dataclass(frozen=True, slots=True)
class Start:
    """Where a request starts.

    Attributes:
        prompt_tokens: What its prefill covers.
        span: Rows of the prefill.
        from_tail: It goes on from a tail.
    """

    prompt_tokens: int
    span: PrefillSpan
    from_tail: bool


def onboard(runner: Runner, request: RunningRequest, tail: FoundTail | None = None) -> bool:
    """Give ``request`` what it needs to run all of its known tokens; False, and no change, if there is no room.

    The longest prefix found in this worker's pages is used if it is worth it (the hit rules, README.md). From a tail
    the request goes on exactly; without one its last window is replayed, so that what follows is tainted, or, if the
    request is exact, a halo is run instead. A deterministic request starts at a cut.
    """
    if not request.hashes:
        request.hashes = runner.chain_of(request)
    hashes = request.hashes[: hittable_blocks(runner, request)]
    needed = -(-request.length // runner.block_tokens)
    if needed - runner.blocks.peek(hashes) > runner.blocks.available():
        return False  # the usual answer while the worker is full: no reference is taken for it
    slot = runner.state_slots.acquire()
    if slot is None:
        return False
    found, start, tail = _match(runner, request, hashes, tail)
    try:
        fresh = runner.blocks.reserve(needed - len(found))
    except OutOfPages:
        runner.blocks.release(found)
        runner.state_slots.release(slot)
        return False
    request.slot, request.pages, request.sealed_blocks = slot, found + fresh, len(found)
    asked_tokens = request.prompt_tokens
    request.prompt_tokens, request.private = start.prompt_tokens, False
    request.hit_tokens, request.replayed_rows = start.span.publish_from, 0
    request.begin(start.span)
    request.tainted_from = _tainted_from(runner, request, found, tail)
    if tail is None:
        return True
    try:
        runner.restore_tail(request, tail.record_B, checksum=tail.checksum, exact=tail.exact)
    except TailError as error:
        log.warning("tail refused", extra={"request": request.request_id, "error": str(error)})
        runner.release(request)
        request.prompt_tokens = asked_tokens
        return onboard(runner, request)
    return True


def plan_start(runner: Runner, request: RunningRequest, blocks: int, tail_at: int | None) -> Start:
    """How a request starts after a chain of ``blocks`` blocks, with a tail at ``tail_at`` if there is one.

    A tail is used if its blocks are there and no more rows are to be run than without it. A hit that reaches beyond the
    prompt into tokens that an earlier worker drew makes all of them the prompt.
    """
    if request.every_row:
        return Start(request.prompt_tokens, PrefillSpan(0, 0, 0, 0, 0), from_tail=False)
    if request.cuts is not None:
        cut = request.cuts.at_most(blocks * runner.block_tokens, prompt_tokens=request.prompt_tokens)
        span = request.cuts.span(cut, prompt_tokens=request.prompt_tokens)
        return Start(request.prompt_tokens, span, from_tail=False)
    reach = max(blocks * runner.block_tokens, tail_at or 0)
    prompt_tokens = request.prompt_tokens if reach < request.prompt_tokens else request.length
    halo = runner.halo if request.exact else None
    hit = usable_hit(
        blocks * runner.block_tokens,
        prompt_tokens=prompt_tokens,
        window=runner.window,
        block_tokens=runner.block_tokens,
        has_tail=False,
        slack=runner.slack,
        halo=halo,
    )

    def plan(hit_tokens: int, *, has_tail: bool) -> PrefillSpan:
        return plan_prefill(
            prompt_tokens=prompt_tokens,
            hit_tokens=hit_tokens,
            window=runner.window,
            slack=runner.slack,
            has_tail=has_tail,
            halo=halo,
        )

    bare = plan(hit, has_tail=False)
    if tail_at is None or tail_at // runner.block_tokens > blocks:
        return Start(prompt_tokens, bare, from_tail=False)
    if not bare.first_row <= tail_at < prompt_tokens:
        return Start(prompt_tokens, bare, from_tail=False)
    return Start(prompt_tokens, plan(tail_at, has_tail=True), from_tail=True)


def hittable_blocks(runner: Runner, request: RunningRequest) -> int:
    """Blocks of a request that a hit may consist of: at least one token is computed."""
    if request.cuts is not None:
        return request.cuts.last(request.prompt_tokens) // runner.block_tokens
    end = request.length if request.resumed else request.prompt_tokens
    return 0 if request.every_row else (end - 1) // runner.block_tokens


def _match(
    runner: Runner, request: RunningRequest, hashes: Sequence[BlockHash], tail: FoundTail | None
) -> tuple[list[PageId], Start, FoundTail | None]:
    """Pages of a hit worth using, referenced, and what to do after them."""
    pages = runner.blocks.match(hashes, exact=request.exact)
    if tail is not None and (request.cuts is not None or (request.exact and not tail.exact)):
        tail = None
    start = plan_start(runner, request, len(pages), tail.position if tail else None)
    used = start.span.publish_from // runner.block_tokens
    runner.blocks.release(pages[used:])
    return pages[:used], start, tail if start.from_tail else None


def _tainted_from(
    runner: Runner, request: RunningRequest, found: Sequence[PageId], tail: FoundTail | None
) -> int | None:
    """Where the request's own blocks begin if anything before them was replayed."""
    if request.cuts is not None:
        return request.cuts.every_tokens  # the same for all that share these blocks, whoever made them
    if request.exact or not request.span.publish_from:
        return None
    if tail is not None and tail.exact and all(info.exact for info in runner.blocks.describe_all(found)):
        return None
    return len(found) * runner.block_tokens
