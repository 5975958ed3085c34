"""One prepared run on an accelerator: is every kernel right there, how long does it take, how long does a layer.

    python -m epdserve.loadtest.gpu_check [--device cuda] [--json FILE] [--minutes 7]
    TRITON_INTERPRET=1 python -m epdserve.loadtest.gpu_check --dry-run

Every kernel against its reference in higher precision, then its time with bytes, rate and the fraction of the ceiling
that the same run measured (a copy, a bfloat16 product); layers and steps of the released model's shapes; goldens of the
tiny model. Prints one Markdown table and writes it as JSON after every row, so that a run cut short leaves what it has.

Another process touches the device (``gpu/work.py``). If it dies, hangs, or loses the device, the unit it was in gets a
row that says so and a new one goes on behind it. Before that some processes compile all kernels side by side. Kernels,
model and layers have a part of the time each, so that none takes another's. Exit status 1 if a row is wrong.
Needs torch and Triton, no network; the model's rows also what serving needs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from epdserve.loadtest.gpu.report import Report, Row

_PARTS: Final = {"cases": 0.6, "model": 0.75, "layers": 1.0}  # of the time, by which each kind begins no more
_COMPILERS: Final = 8
_COMPILE_PART: Final = 0.25
_MOST_DEATHS: Final = 20
_GRACE_S: Final = 45.0  # for what began in time
_WORKER: Final = "--work"


def main() -> int:
    """Run the command; returns its exit status."""
    arguments = sys.argv[1:]
    if arguments[:1] == [_WORKER]:
        from epdserve.loadtest.gpu.work import Order, work  # imports torch and Triton

        return work(Order(**json.loads(arguments[1])))
    asked = _parser().parse_args(arguments)
    began = time.monotonic()
    report = Report(asked.json)
    order = {
        "device": "cpu" if asked.dry_run else asked.device,
        "dry_run": asked.dry_run,
        "only": asked.only,
        "golden": str(asked.golden),
        "ends": {kind: began + 60 * asked.minutes * part for kind, part in _PARTS.items()},
    }
    if asked.compilers and not asked.dry_run:
        _compile(order, asked.compilers, began + 60 * asked.minutes * _COMPILE_PART)
    run_all(order, report, limit_s=asked.limit, until=began + 60 * asked.minutes + _GRACE_S)
    if asked.json:
        report.write(asked.json)
    print(f"\n{time.monotonic() - began:.0f} s", flush=True)
    return 1 if report.failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description="Check and time kernels, layers and the model on a device."
    )
    parser.add_argument("--device", default="cuda", help="torch device")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes on the CPU, in Triton's interpreter"
    )
    parser.add_argument("--minutes", type=float, default=7.0, help="nothing begins after this long")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds without a row that end a process")
    parser.add_argument("--compilers", type=int, default=_COMPILERS, help="processes that compile first")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument(
        "--golden", type=Path, default=Path("tests/golden/tiny"), help="the tiny model's folder"
    )
    parser.add_argument("--json", type=Path, help="also write the rows here")
    return parser


def run_all(order: dict[str, Any], report: Report, *, limit_s: float, until: float = math.inf) -> None:
    """Every unit, by as many processes as it takes; whatever runs at ``until`` (monotonic clock) is ended."""
    skip, ceilings = 0, None
    for _ in range(_MOST_DEATHS):
        name, said = "start", dict[str, Any]()
        with closing(_lines({**order, "skip": skip, "ceilings": ceilings}, limit_s, until)) as lines:
            for said in lines:
                ceilings = said.get("ceilings", ceilings)
                if "unit" in said:
                    skip, name = said["unit"] + 1, said["name"]
                _take(report, said, name)
        if name == "start" or said.get("ended") == "0" or time.monotonic() >= until:
            return  # done, or it would end so every time
    report.add(Row("the rest", f"FAILED: {_MOST_DEATHS} processes ended before their time"))


def _take(report: Report, said: dict[str, Any], name: str) -> None:
    if "device" in said:
        report.begin(said["device"])
    elif "row" in said:
        report.add(Row(**said["row"]))
    elif "launched" in said:
        report.kernels = said["launched"]
    elif said.get("ended", "0") != "0" and not _has_said_so(report, name):
        report.add(Row(name, f"FAILED: {said['ended']}"))


def _has_said_so(report: Report, name: str) -> bool:
    """Whether the unit that a process ended in has said itself what was wrong."""
    return bool(report.rows) and report.rows[-1].what == name and report.rows[-1].verdict.startswith("FAILED")


def _lines(order: dict[str, Any], limit_s: float, until: float) -> Generator[dict[str, Any], None, None]:
    """What a process says; last how it ended: "0", or what happened. Killed if it is silent for too long."""
    command = [sys.executable, "-m", "epdserve.loadtest.gpu_check", _WORKER, json.dumps(order)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said: queue.Queue[str | None] = queue.Queue()
    errors: list[str] = []
    readers = [
        threading.Thread(target=_read, args=(process, said), daemon=True),
        threading.Thread(target=_keep_last, args=(process, errors), daemon=True),
    ]
    for reader in readers:
        reader.start()
    try:
        while True:
            try:
                line = said.get(timeout=max(0.0, min(limit_s, until - time.monotonic())))
            except queue.Empty:
                late = time.monotonic() >= until
                yield {"ended": "time is up" if late else f"nothing said for {limit_s:.0f} s"}
                return
            if line is None:
                break
            if line.startswith("{"):
                yield json.loads(line)
        status = process.wait(timeout=limit_s)
        readers[1].join(limit_s)
        last = errors[-1].strip()[:200].replace("|", "/") if errors and status else ""
        yield {"ended": "0" if status == 0 else f"the process ended with {status}: {last}"}
    finally:
        process.kill()
        process.wait()
        for reader in readers:
            reader.join(limit_s)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _read(process: subprocess.Popen[str], said: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        said.put(line)
    said.put(None)


def _keep_last(process: subprocess.Popen[str], errors: list[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if line.strip():
            errors[:] = [line]


def _compile(order: dict[str, Any], processes: int, until: float) -> None:
    """Compile the kernels of all cases side by side; what is not done by then is compiled when it is wanted."""
    count = max(1, min(processes, os.cpu_count() or 1))
    ends = {kind: until for kind in order["ends"]}
    command = [sys.executable, "-m", "epdserve.loadtest.gpu_check", _WORKER]
    running = [
        subprocess.Popen(
            [*command, json.dumps({**order, "skip": 0, "ends": ends, "warm": (i, count)})],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for i in range(count)
    ]
    for process in running:
        try:
            process.wait(timeout=max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
