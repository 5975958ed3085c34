"""Every system call of a life may fail, once or from then on: reads give exact bytes or a miss, and the books agree.

Beside ``test_crash.py``, whose processes die, these live on. The long matrix, every call and every error:
``PYTHONSAFEPATH=1 pytest tests/kvstore/ssd/test_error_matrix.py -m slow -s``
"""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
from collections import Counter
from pathlib import Path
from typing import Final

import pytest
from epdserve.kvstore.ssd.errors import DeletionIncomplete, NoUsableDirectory
from epdserve.kvstore.ssd.retention import Admission, Mode, RetentionPolicy
from epdserve.kvstore.ssd.tier import SsdTier
from support.broken_disk import BrokenDisk
from support.manual_clock import ManualClock
from support.ssd import OTHER, TENANT, make_tier, name, put_of, read, same

POLICY = RetentionPolicy(
    floor_s=60,
    mode=Mode.FLOOR,
    reserve_ratio=0.0,
    low_free_ratio=0.3,
    high_free_ratio=0.45,
    last_use_step_s=30,
)
SLOTS: Final = 7
LABELS: Final = "abcdefghijklm"
ERRORS: Final = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EROFS": errno.EROFS}


def exact_or_missing(tier: SsdTier) -> int:
    """How many blocks are there; asserts that those are right."""
    found = 0
    for label in LABELS:
        page = read(tier, [name(label)])[0]
        assert page is None or any(same(page, name(label), version=v, exact=v > 0) for v in (0, 1))
        found += page is not None
    return found


def live(tier: SsdTier, clock: ManualClock) -> bool:
    """Everything the tier does; what cannot be done is refused or missing, and never raised.

    Returns:
        Whether OTHER's blocks were deleted for good.
    """
    deleted = False
    for label in "abcd":
        parent = None if label == "a" else name(chr(ord(label) - 1))
        tier.put_batch([put_of(name(label), parent=parent, tenant=TENANT, exact=False)])
    tier.put_batch([put_of(name(label), tenant=OTHER, exact=False) for label in "efg"])
    clock.advance(100.0)
    tier.put_batch([put_of(name("e"), tenant=OTHER, version=1)])
    tier.touch([name("a"), name("b")])
    tier.save_use()
    exact_or_missing(tier)
    tier.put_batch([put_of(name(label), exact=False) for label in "hij"])
    tier.sweep()
    tier.put_batch([put_of(name(label), exact=False) for label in "klm"])
    with contextlib.suppress(DeletionIncomplete):
        tier.delete_tenant(OTHER)
        deleted = True
    exact_or_missing(tier)
    with contextlib.suppress(OSError):  # of a drive that fails just now
        tier.check()
    return deleted


def at_call(operation_number: int, number: int, *, lasting: bool, part: str) -> tuple[BrokenDisk, list[str]]:
    """A disk whose call of this number fails, and which one that was; ``lasting``: and all later ones on that drive."""
    disk, hit = BrokenDisk(), list[str]()

    def fault(operation: str, path: str, offset: int) -> int | None:
        here = disk.calls - 1
        if (here == operation_number or (lasting and here > operation_number)) and part in path:
            hit.append(operation)
            return number
        return None

    disk.fault = fault
    return disk, hit


def survive(root: Path, at: int, number: int, *, lasting: bool) -> tuple[str, int]:
    """One life with an error in it; returns what failed and how many blocks a restart on a sound disk finds."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    folders, clock = [root / "one", root / "two"], ManualClock()
    disk, hit = at_call(at, number, lasting=lasting, part="two" if lasting else "")
    tier = make_tier(folders, slots=SLOTS, clock=clock, policy=POLICY, disk=disk)
    deleted = False
    try:
        tier.open()
        deleted = live(tier, clock)
        tier.close()
    except NoUsableDirectory:
        tier.abandon()
    if at % 2:
        for folder in folders:
            (folder / "names.tbl").unlink(missing_ok=True)
    again = make_tier(folders, slots=SLOTS, clock=clock, policy=POLICY, disk=BrokenDisk())
    again.open()
    found = exact_or_missing(again)
    assert not (deleted and any(again.contains(name(label)) for label in "efg"))
    again.check()
    again.sweep()
    if again.put_batch([put_of(name("new"))]) == [Admission.ACCEPTED]:
        assert same(read(again, [name("new")])[0], name("new"))
    again.check()
    again.close()
    return hit[0] if hit else "none", found


def calls(root: Path) -> int:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    disk, clock = BrokenDisk(), ManualClock()
    tier = make_tier([root / "one", root / "two"], slots=SLOTS, clock=clock, policy=POLICY, disk=disk)
    tier.open()
    live(tier, clock)
    tier.close()
    return disk.calls


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from-then-on"])
@pytest.mark.parametrize("error", ERRORS)
def test_an_error_at_any_call(
    tmp_path: Path, error: str, lasting: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    total = calls(tmp_path / "r")
    found = [
        survive(tmp_path / "r", at, ERRORS[error], lasting=lasting)[1]
        for at in range(list(ERRORS).index(error), total, 7)
    ]
    assert max(found) > 5  # errors cost blocks, not all of them


@pytest.mark.slow
def test_every_error_at_every_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    total, seen, blocks = calls(tmp_path / "r"), Counter[str](), 0
    for error, number in ERRORS.items():
        for lasting in (False, True):
            for at in range(total):
                operation, found = survive(tmp_path / "r", at, number, lasting=lasting)
                seen[f"{error} {operation}"] += 1
                blocks += found
    with capsys.disabled():
        print(
            f"\n{total} calls in a life, {sum(seen.values())} lives: {dict(sorted(seen.items()))}; {blocks} found"
        )
