import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from epdserve.services.cli.children import Child, log_tail
from epdserve.services.cli.errors import CommandError

SLEEPER = "print('up', flush=True); import time; time.sleep(60)"


def child(program: str, log: Path) -> Child:
    return Child("worker", [sys.executable, "-c", program], log=log, env={"COLOUR": "blue"})


async def test_a_child_writes_its_log_and_sees_its_environment(tmp_path: Path) -> None:
    log = tmp_path / "log"
    running = child(f"import os; print(os.environ['COLOUR']); {SLEEPER}", log)
    await running.wait_until(lambda: "up" in log.read_text(), timeout_s=20)
    assert log.read_text().splitlines() == ["blue", "up"]
    assert running.exit_status() is None
    await running.stop()
    assert running.exit_status() == "signal SIGTERM"


async def test_a_child_that_ends_early_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    failing = child("import sys; print('no such model'); sys.exit(3)", tmp_path / "log")
    with pytest.raises(CommandError, match=r"worker ended with exit status 3(.|\n)*no such model"):
        await failing.wait_until(lambda: False, timeout_s=20)


async def test_a_child_that_is_never_ready_is_reported(tmp_path: Path) -> None:
    slow = child(SLEEPER, tmp_path / "log")
    with pytest.raises(CommandError, match="not ready within 0 s"):
        await slow.wait_until(lambda: False, timeout_s=0.1)
    await slow.stop()


async def test_a_deaf_child_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    deaf = child(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPER}", log)
    await deaf.wait_until(lambda: "up" in log.read_text(), timeout_s=20)
    await deaf.stop(timeout_s=0.1)
    assert deaf.exit_status() == "signal SIGKILL"


def test_a_child_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = f"""
import asyncio, os, sys, time
from pathlib import Path
from epdserve.services.cli.children import Child
log = Path({str(log)!r})
child = Child("worker", [sys.executable, "-c", {SLEEPER!r}], log=log, env={{}})
asyncio.run(child.wait_until(lambda: "up" in log.read_text(), timeout_s=20))
print(child.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    give_up_at = time.monotonic() + 20
    while _runs(pid) and time.monotonic() < give_up_at:
        time.sleep(0.02)
    assert not _runs(pid)


def test_log_tail_of_nothing(tmp_path: Path) -> None:
    assert "nothing" in log_tail(tmp_path / "absent")


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    assert os.getpid() != pid
    return state != "Z"
