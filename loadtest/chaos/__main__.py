"""``python -m epdserve.loadtest.chaos PLAN``: misfortune by plan, judged by declared targets and invariants.

    python -m epdserve.loadtest.chaos loadtest/chaos/plans/short.toml [--json FILE] [--html FILE] [--keep FOLDER]

Exit status 1 if something was not fine, 2 if the plan cannot be carried out here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer
from epdserve.loadtest.chaos.cluster import Cluster, NotStartedError
from epdserve.loadtest.chaos.disks import small_drive
from epdserve.loadtest.chaos.drive import Run, carry_out, records_of
from epdserve.loadtest.chaos.judge import rows
from epdserve.loadtest.chaos.network import ALONE, two_namespaces
from epdserve.loadtest.chaos.plan import Plan, PlanError, What, read_plan
from epdserve.loadtest.results import report, terminal
from epdserve.loadtest.results.record import Results, Slo
from epdserve.loadtest.server import end_well

_DRIVE_BYTES: Final = 48 << 20
_MODEL_S: Final = 120.0


def perform(plan: Plan, folder: Path, model_dir: Path) -> Run:
    """One plan with its files in a folder.

    Raises:
        NotStartedError, RuntimeError: It cannot be done here.
    """
    if plan.needs_root and os.geteuid() != 0:
        raise RuntimeError(f"{plan.name} has faults that only root can make")
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as exits:
        network = exits.enter_context(two_namespaces()) if plan.apart else ALONE
        drives: tuple[Path, ...] = ()
        if any(fault.what in (What.DISK_FULL, What.SLOW_DISK) for fault in plan.faults):
            small = exits.enter_context(small_drive(folder / "drive-1", nbytes=_DRIVE_BYTES))
            drives = (folder / "drive-0", small)
        cluster = Cluster(plan, folder, model_dir, network, drives)
        run = asyncio.run(carry_out(plan, cluster, lambda line: print(line, file=sys.stderr, flush=True)))
    return run


def demo_model(folder: Path) -> Path:
    """Write the demo model; its folder."""
    command = [sys.executable, "-P", "-m", "epdserve.services.cli", "demo-model", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=_MODEL_S)
    return folder


def main(
    plan_file: Annotated[Path, typer.Argument(help="TOML; README.md tells every key.", metavar="PLAN")],
    shorten: Annotated[float, typer.Option(min=0.01, max=1.0, help="Run in this share of the time.")] = 1.0,
    model: Annotated[Path | None, typer.Option(help="Checkpoint; the demo model if not given.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Folder for logs and settings, kept.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write what was seen here.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="A page with plots.")] = None,
) -> None:
    """Carry a plan out and judge it."""
    end_well()
    with tempfile.TemporaryDirectory(prefix="epdserve-chaos-") as scratch:
        try:
            plan = read_plan(plan_file)
            plan = plan if shorten == 1.0 else plan.shortened(shorten)
            model_dir = model or demo_model(Path(scratch) / "model")
            run = perform(plan, keep or Path(scratch) / "run", model_dir.absolute())
        except (PlanError, NotStartedError, RuntimeError, subprocess.SubprocessError) as error:
            print(f"chaos: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
    _tell(plan, run, json_file, html_file)
    raise typer.Exit(int(bool(run.verdict.problems)))


def _tell(plan: Plan, run: Run, json_file: Path | None, html_file: Path | None) -> None:
    phases, faults = rows(run.verdict)
    terminal.show(phases, title=f"{plan.name}, peak {run.peak_per_s:.2f} requests/s")
    if plan.faults:
        terminal.show(faults)
    for problem in run.verdict.problems:
        print(f"NOT FINE: {problem}")
    print("fine" if not run.verdict.problems else f"{len(run.verdict.problems)} problems")
    if json_file is not None:
        told = {"plan": plan.name, "peak_per_s": run.peak_per_s, "verdict": asdict(run.verdict)}
        json_file.write_text(json.dumps(told, indent=1))
    if html_file is not None:
        slo = Slo(plan.targets.ttft_s, plan.targets.tpot_s)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        results = Results(plan.name, now, {"plan": plan.name}, slo, plan.seconds, records_of(run.asked))
        html_file.write_text(report.page(results), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
