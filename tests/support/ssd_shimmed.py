"""Lives of an SSD tier with native threads, each in a process of its own, under ``ssd_shim.c`` (LD_PRELOAD).

Arguments: a folder, then cases as ``AT:WHAT:once`` or ``AT:WHAT:on`` (what the shim does at which call, once or from
then on). Case number i lives in ``i/``; ``i.out`` tells what it knew, ``i.status`` how it ended.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from epdserve.kvstore.ssd.crew import NativeCrew
from epdserve.kvstore.ssd.errors import DeletionIncomplete, NoUsableDirectory
from epdserve.kvstore.ssd.retention import Mode, RetentionPolicy
from epdserve.kvstore.ssd.tier import SsdTier
from support.ssd import OTHER, TENANT, make_tier, name, put_of, read, same

POLICY = RetentionPolicy(
    floor_s=0, mode=Mode.BEST_EFFORT, reserve_ratio=0.0, low_free_ratio=0.3, high_free_ratio=0.45
)
BLOCKS, BATCH, SLOTS = 36, 6, 30


def shimmed(folder: Path, *, threads: int = 2) -> SsdTier:
    """The tier of a life, and of whoever looks at what is left of it."""
    return make_tier(
        [folder],
        slots=SLOTS,
        threads=threads,
        policy=POLICY,
        settings={"slots_per_file": 11, "batch_blocks": 6},
    )


def live(folder: Path) -> None:
    """Put, read, sweep, write over, delete, close. Prints ``have`` and the blocks that are durable, as it goes."""
    tier = shimmed(folder)
    assert isinstance(tier._core.inventory.directories[0]._crew, NativeCrew)
    try:
        tier.open()
    except NoUsableDirectory:
        tier.abandon()
        return
    for first in range(0, BLOCKS, BATCH):
        if first == 4 * BATCH:
            print("sweeps", flush=True)
            tier.sweep()
            tell(tier)
        tenant = OTHER if first == BATCH else TENANT
        tier.put_batch([put_of(name(number), tenant=tenant) for number in range(first, first + BATCH)])
        tell(tier)
        exact_or_missing(tier)
    print("deletes", flush=True)
    with contextlib.suppress(DeletionIncomplete):
        tier.delete_tenant(OTHER)
        assert not any(tier.contains(name(number)) for number in range(BATCH, 2 * BATCH))
    tell(tier)
    exact_or_missing(tier)
    with contextlib.suppress(OSError):  # of a drive that fails just now
        tier.check(deep=True)
    tier.close()
    print("closed", flush=True)


def tell(tier: SsdTier) -> None:
    print("have", *(number for number in range(BLOCKS) if tier.contains(name(number))), flush=True)


def exact_or_missing(tier: SsdTier) -> int:
    """How many blocks are there; asserts that they are right."""
    blocks = [name(number) for number in range(BLOCKS)]
    pages = read(tier, blocks)
    assert all(page is None or same(page, block) for page, block in zip(pages, blocks, strict=True))
    return sum(page is not None for page in pages)


def main() -> None:
    root = Path(sys.argv[1])
    for number, case in enumerate(sys.argv[2:]):
        at, what, span = case.split(":")
        child = os.fork()
        if child == 0:
            os.environ.update({"SHIM_AT": at, "SHIM_DO": what, "SHIM_LOG": str(root / f"{number}.calls")})
            os.environ.update({"SHIM_FROM": "1"} if span == "on" else {})
            sys.stdout = (root / f"{number}.out").open("w")
            live(root / str(number))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        (root / f"{number}.status").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()
