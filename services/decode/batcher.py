"""Continuous batching as a pure decision: who runs the next step, who goes out, who comes in.

Snapshot in, plan out; the decode worker carries it out and asks again before the next step. Rules:

1. A running request that needs a page for its next row gets one while pages last.
2. If they do not last, running requests give theirs up (their state goes to host memory): those that are worth least
   where they are, the youngest of them on a tie. The oldest is never preempted, so something always moves forward.
3. Preempted requests come back oldest first, before anything new; new requests start in order of arrival. Both only
   while the pages that stay free cover one page for each running request (the watermark), so that what comes in is not
   thrown out by the next block that fills.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holder:
    """A running request: its place in the order of arrival, pages it holds, pages its next row needs on top.

    Attributes:
        worth: The least of it is taken out first (``policy/order.py``: priority, expected rest).
    """

    arrival: int
    pages: int
    growth: int
    worth: tuple[int, float] = (0, 0.0)


@dataclass(frozen=True, slots=True)
class Claim:
    """A request that wants to come in, and the pages it needs before it can run."""

    arrival: int
    pages: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to do before the next step; requests are named by arrival.

    Attributes:
        preempt: Running requests to move out, the one worth least first.
        stalled: Running requests that must skip the step: nothing is left to preempt for them.
        resume: Preempted requests to bring back, in this order.
        admit: Number of waiting requests to start, from the head of the queue.
    """

    preempt: tuple[int, ...] = ()
    stalled: tuple[int, ...] = ()
    resume: tuple[int, ...] = ()
    admit: int = 0


def plan_step(
    running: Sequence[Holder],
    preempted: Sequence[Claim],
    waiting: Sequence[Claim],
    *,
    free_pages: int,
    free_slots: int,
    others_hold_pages: bool = False,
) -> StepPlan:
    """Plan one step.

    Args:
        running: Requests in the batch, any order.
        preempted: Requests moved out earlier.
        waiting: New requests in order of arrival.
        free_pages: Pages that a reservation can get now.
        free_slots: State slots that are free.
        others_hold_pages: Requests that are being pulled hold pages and are not in ``running``.
    """
    growth = sum(holder.growth for holder in running)
    if growth > free_pages:
        return _make_room(running, free_pages=free_pages)
    spare, batch = free_pages - growth, len(running)
    resume: list[int] = []
    for claim in sorted(preempted, key=lambda claim: claim.arrival):
        if not _fits(claim, spare, batch, free_slots, others_hold_pages):
            return StepPlan(resume=tuple(resume))
        spare, batch, free_slots = spare - claim.pages, batch + 1, free_slots - 1
        resume.append(claim.arrival)
    admit = 0
    for claim in waiting:
        if not _fits(claim, spare, batch, free_slots, others_hold_pages):
            break
        spare, batch, free_slots, admit = spare - claim.pages, batch + 1, free_slots - 1, admit + 1
    return StepPlan(resume=tuple(resume), admit=admit)


def _fits(claim: Claim, spare: int, batch: int, free_slots: int, others_hold_pages: bool) -> bool:
    alone = batch == 0 and not others_hold_pages  # the only request may use the last page
    watermark = 0 if alone else batch + 1
    return free_slots > 0 and claim.pages + watermark <= spare


def _make_room(running: Sequence[Holder], *, free_pages: int) -> StepPlan:
    """Take out who is worth least; pages shared with others do not come free, so the count is checked again later."""
    oldest, *others = sorted(running, key=lambda holder: holder.arrival)
    others.sort(key=lambda holder: (holder.worth, -holder.arrival), reverse=True)
    preempt: list[int] = []
    while others and oldest.growth + sum(holder.growth for holder in others) > free_pages:
        victim = others.pop()
        free_pages += victim.pages
        preempt.append(victim.arrival)
    stalled = []
    for holder in [oldest, *sorted(others, key=lambda holder: holder.arrival)]:
        if holder.growth > free_pages:
            stalled.append(holder.arrival)
        else:
            free_pages -= holder.growth
    return StepPlan(preempt=tuple(preempt), stalled=tuple(stalled))
