"""The crash matrix: a life of put, replace, sweep, delete and recover, cut at every one of its system calls.

After each cut the tier is opened again. What must hold: a read gives exact bytes or a miss; what was durable and not
told to go is there; what was deleted for good is not; memory, table, records and space agree; the tier works on.

The short matrix runs in CI. The long one, every call, two ways to die and more seeds, with and without the table:
``PYTHONSAFEPATH=1 pytest tests/kvstore/ssd/test_crash.py -m slow -s``
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from epdserve.kvstore.ssd.disk import SystemDisk
from epdserve.kvstore.ssd.retention import Admission
from support.broken_disk import BrokenDisk, PowerCut
from support.child import environment
from support.manual_clock import ManualClock
from support.ssd import make_tier, name, put_of, read, same
from support.ssd_life import POLICY, SLOTS, Life, live


def inspect(life: Life, folders: list[Path], clock: ManualClock, *, lost_tables: bool = False) -> int:
    """Open what is left and hold it to its promises; returns how many blocks are there.

    Without tables, slots that were half written over what had been evicted may look like blocks until they are read.
    """
    if lost_tables:
        for folder in folders:
            (folder / "names.tbl").unlink(missing_ok=True)
    tier = make_tier(folders, slots=SLOTS, clock=clock, policy=POLICY, disk=BrokenDisk())
    tier.open()
    tier.check(deep=True)
    found = 0
    for block in life.stored:
        page = read(tier, [block])[0]
        assert page is None or any(same(page, block, version=v, exact=v > 0) for v in life.stored[block])
        assert page is not None or block not in life.durable - life.may_go
        assert page is None or block not in life.deleted
        found += page is not None
    tier.check(deep=True)
    bad = tier.figures.slots("quarantined")
    assert bad == 0 or lost_tables, "data before names, names before data: no record may be found bad"
    new = name("new")
    tier.sweep()
    if tier.put_batch([put_of(new)])[0] is Admission.ACCEPTED:
        assert same(read(tier, [new])[0], new, exact=True)
    tier.check(deep=True)
    tier.close()
    return found


def folders_in(root: Path) -> list[Path]:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    return [root / "one", root / "two"]


def calls_of_a_life(root: Path) -> int:
    disk = BrokenDisk()
    live(Life(), folders_in(root), disk, ManualClock())
    return disk.calls


def cut_life(root: Path, cut_at: int, *, forgetful: bool, seed: int) -> tuple[Life, list[Path], ManualClock]:
    life, folders, clock = Life(), folders_in(root), ManualClock()
    with pytest.raises(PowerCut):
        live(life, folders, BrokenDisk(cut_at=cut_at, forgetful=forgetful, seed=seed), clock)
    return life, folders, clock


def test_a_whole_life_keeps_its_promises(tmp_path: Path) -> None:
    life, folders, clock = Life(), folders_in(tmp_path / "r"), ManualClock()
    live(life, folders, SystemDisk(), clock)
    assert inspect(life, folders, clock) == len(life.durable)


@pytest.mark.parametrize("lost_tables", [False, True], ids=["tables-kept", "tables-lost"])
@pytest.mark.parametrize("forgetful", [False, True], ids=["killed", "power-cut"])
def test_cut_anywhere_in_a_life(tmp_path: Path, forgetful: bool, lost_tables: bool) -> None:
    calls = calls_of_a_life(tmp_path / "r")
    for cut_at in range(forgetful, calls, 6 if lost_tables else 3):
        life, folders, clock = cut_life(tmp_path / "r", cut_at, forgetful=forgetful, seed=cut_at)
        inspect(life, folders, clock, lost_tables=lost_tables)


def test_cut_anywhere_in_a_recovery(tmp_path: Path) -> None:
    calls = calls_of_a_life(tmp_path / "r")
    for cut_at in (calls // 3, calls * 2 // 3, calls - 20):
        for again in range(0, 400, 3):
            life, folders, clock = cut_life(tmp_path / "r", cut_at, forgetful=True, seed=again)
            disk = BrokenDisk(cut_at=again, forgetful=True, seed=again)
            tier = make_tier(folders, slots=SLOTS, clock=clock, policy=POLICY, disk=disk)
            try:
                tier.open()
            except PowerCut:
                inspect(life, folders, clock)
                continue
            tier.abandon()
            break


def killed_lives(root: Path, cuts: range) -> int:
    """Lives in processes that got SIGKILL before the given calls; returns how many blocks were found."""
    shutil.rmtree(root, ignore_errors=True)
    arguments = [str(root), str(cuts.start), str(cuts.stop), str(cuts.step)]
    subprocess.run(
        [sys.executable, "-P", "-m", "support.ssd_kills", *arguments],
        env=environment(),
        check=True,
        timeout=300,
    )
    found = 0
    for cut_at in cuts:
        life, _, clock = cut_life(root / "replayed", cut_at, forgetful=False, seed=0)  # the same, up to there
        found += inspect(life, [root / str(cut_at) / "one", root / str(cut_at) / "two"], clock)
    return found


def test_a_process_killed_before_a_call_leaves_what_it_promised(tmp_path: Path) -> None:
    calls = calls_of_a_life(tmp_path / "r")
    assert killed_lives(tmp_path / "k", range(5, calls, 12)) > 0


@pytest.mark.slow
def test_a_process_killed_before_every_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = calls_of_a_life(tmp_path / "r")
    found = killed_lives(tmp_path / "k", range(calls))
    with capsys.disabled():
        print(f"\n{calls} processes killed, one before each call; {found} blocks found, none of them wrong")


@pytest.mark.slow
def test_the_long_matrix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls, runs = calls_of_a_life(tmp_path / "r"), Counter[str]()
    for seed in range(3):
        for cut_at in range(calls):
            for forgetful in (False, True):
                life, folders, clock = cut_life(tmp_path / "r", cut_at, forgetful=forgetful, seed=seed)
                runs["blocks found"] += inspect(life, folders, clock, lost_tables=seed == 2)
                runs["power cuts" if forgetful else "kills"] += 1
            runs["recoveries cut"] += _cut_recoveries(tmp_path / "r", cut_at, seed) if seed == 0 else 0
    with capsys.disabled():
        print(f"\n{calls} system calls in a life; {dict(runs)}; no wrong byte, no lost slot")


def _cut_recoveries(root: Path, cut_at: int, seed: int) -> int:
    count = 0
    for again in range(cut_at % 3, 400, 3):
        life, folders, clock = cut_life(root, cut_at, forgetful=True, seed=seed)
        disk = BrokenDisk(cut_at=again, forgetful=True, seed=seed)
        tier = make_tier(folders, slots=SLOTS, clock=clock, policy=POLICY, disk=disk)
        try:
            tier.open()
        except PowerCut:
            inspect(life, folders, clock)
            count += 1
            continue
        tier.abandon()
        break
    return count
