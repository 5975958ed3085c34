"""Native threads under faults: every write, read and sync of a whole process is cut, torn, short or fails.

A library that is loaded before libc does it (``support/ssd_shim.c``), so nothing of the tier is replaced: not the disk,
not the threads. The other matrices play through ``BrokenDisk``; this one proves the way that serves. Every call:
``PYTHONSAFEPATH=1 pytest tests/kvstore/ssd/test_shim.py -m slow -s``
"""

from __future__ import annotations

import errno
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from epdserve.kvstore.native import native
from epdserve.kvstore.ssd.retention import Admission
from support import ssd_shimmed
from support.child import environment
from support.ssd import name, put_of, read, same

SUPPORT = Path(ssd_shimmed.__file__).parent
pytestmark = pytest.mark.skipif(native() is None or shutil.which("gcc") is None, reason="no native code here")


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    subprocess.run(
        ["gcc", "-O1", "-shared", "-fPIC", SUPPORT / "ssd_shim.c", "-o", library], check=True, timeout=60
    )
    return library


def lives(root: Path, shim: Path, cases: list[str]) -> list[tuple[int, list[str]]]:
    """How each life ended (0, or minus a signal's number), and what it said."""
    root.mkdir()
    env = environment(LD_PRELOAD=str(shim))
    for variable in ("SHIM_AT", "SHIM_DO", "SHIM_FROM", "SHIM_LOG"):
        env.pop(variable, None)
    command = [sys.executable, "-P", "-m", "support.ssd_shimmed", str(root), *cases]
    subprocess.run(command, env=env, check=True, timeout=400, stderr=subprocess.PIPE)
    return [
        (int((root / f"{at}.status").read_text()), (root / f"{at}.out").read_text().splitlines())
        for at in range(len(cases))
    ]


def inspect(folder: Path, said: list[str], *, errors: bool) -> int:
    """Open what a life left and hold it to what it said; returns how many blocks are there."""
    tier = ssd_shimmed.shimmed(folder)
    tier.open()
    tier.check(deep=True)
    last = said[-1].split() if said else [""]
    if last[0] == "have" and not errors:  # nothing that was durable is gone
        assert all(tier.contains(name(int(number))) for number in last[1:])
    found = ssd_shimmed.exact_or_missing(tier)
    if not errors:
        assert tier.figures.slots("quarantined") == 0
    tier.sweep()
    if tier.put_batch([put_of(name("new"))])[0] is Admission.ACCEPTED:
        assert same(read(tier, [name("new")])[0], name("new"))
    tier.check(deep=True)
    tier.close()
    return found


def calls_of_a_life(root: Path, shim: Path) -> int:
    ((status, said),) = lives(root, shim, ["-1:none:once"])
    assert (status, said[-1]) == (0, "closed")
    assert len(said[-2].split()) - 1 >= ssd_shimmed.BATCH
    return len((root / "0.calls").read_text())


def matrix(root: Path, shim: Path, cases: list[str]) -> Counter[str]:
    """Lives all the cases; counts them and the blocks found."""
    seen = Counter[str]()
    for at, (status, said) in enumerate(lives(root, shim, cases)):
        what = cases[at].split(":", 1)[1]
        deadly = what.startswith(("kill", "torn"))
        assert status == (-signal.SIGKILL if deadly else 0), f"{cases[at]} ended with {status}, said {said}"
        seen[what] += 1
        seen["blocks found"] += inspect(root / str(at), said, errors=not deadly)
    return seen


def test_any_call_of_native_threads_may_be_the_last_or_fail(tmp_path: Path, shim: Path) -> None:
    calls = calls_of_a_life(tmp_path / "whole", shim)
    cases = [f"{at}:{('kill', 'torn')[at % 2]}:once" for at in range(1, calls - 2, 5)]
    cases += [f"{at}:short:once" for at in range(3, calls, 23)] + ["0:short:on"]
    for number in (errno.EIO, errno.ENOSPC):
        cases += [f"{at}:{number}:{('once', 'on')[at % 2]}" for at in range(number % 10, calls, 16)]
    assert matrix(tmp_path / "r", shim, cases)["blocks found"] > 5 * len(cases)


@pytest.mark.slow
def test_every_call_of_native_threads(tmp_path: Path, shim: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls, seen = calls_of_a_life(tmp_path / "whole", shim), Counter[str]()
    faults = ["kill:once", "torn:once", "short:once", "short:on"]
    faults += [
        f"{number}:{span}" for number in (errno.EIO, errno.ENOSPC, errno.EROFS) for span in ("once", "on")
    ]
    for fault in faults:
        last = (
            calls - 4 if fault.startswith(("kill", "torn")) else calls
        )  # two threads: some lives have a call less
        seen += matrix(tmp_path / fault.replace(":", "-"), shim, [f"{at}:{fault}" for at in range(last)])
    total = sum(seen.values()) - seen["blocks found"]
    with capsys.disabled():
        print(f"\n{calls} calls in a life, {total} lives: {dict(sorted(seen.items()))}")
