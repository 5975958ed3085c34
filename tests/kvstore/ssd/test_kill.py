"""A real process, a real SIGKILL, at any moment of its writing; the next owner finds exact bytes or nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from epdserve.kvstore.ssd.errors import DirectoryOwned
from support import ssd_victim
from support.child import environment
from support.ssd import make_tier, name, read, same

NAPS_S = (0.0, 0.003, 0.011, 0.04)


def start(folder: Path, first: int) -> subprocess.Popen[str]:
    env = environment(PYTHONSAFEPATH="1")
    command = [sys.executable, "-m", "support.ssd_victim", str(folder), str(first)]
    victim = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert victim.stdout is not None
    assert victim.stdout.readline() == "ready\n"
    return victim


def test_sigkill_at_any_moment_loses_nothing_durable_and_gives_no_wrong_byte(tmp_path: Path) -> None:
    durable, first = -1, 0  # numbers; -1: nothing yet
    for nap_s in NAPS_S:
        victim = start(tmp_path, first)
        try:
            with pytest.raises(DirectoryOwned):
                make_tier([tmp_path], slots=ssd_victim.SLOTS, settings={"slots_per_file": 40}).open()
            time.sleep(nap_s)
        finally:
            victim.kill()
            out, _ = victim.communicate(timeout=30)
        lines = [int(line) for line in out.splitlines(keepends=True) if line.endswith("\n")]
        durable = max(lines, default=durable)
        tier = make_tier([tmp_path], slots=ssd_victim.SLOTS, settings={"slots_per_file": 40})
        tier.open()
        tier.check(deep=True)
        recent = [name(number) for number in range(max(first, durable - 20), durable + 9)]
        pages = read(tier, recent)
        assert all(page is None or same(page, block) for page, block in zip(pages, recent, strict=True))
        kept = [name(number) for number in range(max(first, durable - 20), durable + 1)]
        assert all(tier.contains(block) for block in kept)
        assert tier.figures.slots("quarantined") == 0
        tier.check(deep=True)
        tier.close()
        first = durable + 101  # blocks that no earlier victim may have begun
