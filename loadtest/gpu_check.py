"""One prepared run on an accelerator: is every kernel right there, how long does it take, how long does a layer.

    python -m epdserve.loadtest.gpu_check [--device cuda] [--json FILE] [--minutes 8]
    TRITON_INTERPRET=1 python -m epdserve.loadtest.gpu_check --dry-run

Every kernel against its reference in higher precision, then its time with bytes, rate and the fraction of the ceiling
that the same run measured (a copy, a bfloat16 product); layers and steps of the released model's shapes; goldens of the
tiny model. Prints one Markdown table and writes it as JSON after every row, so that a run cut short leaves what it has.
A case that fails leaves a row that says so, and the exit status 1. Needs torch, Triton and typer, no network.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import triton
import typer
from epdserve.loadtest.gpu.case import Case, CaseMaker
from epdserve.loadtest.gpu.cases import case_makers
from epdserve.loadtest.gpu.layers import Weights
from epdserve.loadtest.gpu.shapes import RELEASED, TINY, Shapes
from epdserve.loadtest.gpu.steps import Measured, time_decode, time_prefill, time_replay
from epdserve.loadtest.gpu.timing import Ceilings, Timer, measure_ceilings

StepTimes = Callable[[Shapes, Weights, Timer, str], Iterator[Measured]]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; None where a column does not apply."""

    what: str
    verdict: str  # "ok", or what is wrong
    us: float | None = None
    gbytes_per_s: float | None = None
    tflops_per_s: float | None = None
    of_ceiling: float | None = None  # fraction of max(bytes / copy, FLOPs / product) reached
    graph: bool | None = None  # timed from a captured graph

    def cells(self) -> tuple[str, ...]:
        """Text of each column."""

        def number(value: float | None, form: str) -> str:
            return "" if value is None else format(value, form)

        return (
            self.what,
            self.verdict,
            number(self.us, ",.1f"),
            number(self.gbytes_per_s, ",.0f"),
            number(self.tflops_per_s, ",.1f"),
            number(self.of_ceiling, ".0%"),
        )


HEADER = ("what", "verdict", "us", "GB/s", "TFLOP/s", "of the ceiling")


class Report:
    """Rows as they come, on the screen and in a file."""

    def __init__(self, device: str, path: Path | None) -> None:
        name = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU, interpreted"
        self.head = f"{name}, torch {torch.__version__}, triton {triton.__version__}"
        self.rows: list[Row] = []
        self._path = path
        typer.echo(f"{self.head}\n\n| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")

    def add(self, row: Row) -> None:
        """Show and keep a row."""
        self.rows.append(row)
        typer.echo(f"| {' | '.join(row.cells())} |")
        if self._path is not None:
            self._path.write_text(
                json.dumps({"device": self.head, "rows": [asdict(row) for row in self.rows]}, indent=1) + "\n"
            )

    @property
    def failed(self) -> bool:
        """Whether any row is wrong."""
        return any(row.verdict not in ("ok", "", "no time left") for row in self.rows)


def measure(name: str, case: Case, timer: Timer, ceilings: Ceilings) -> Row:
    """Check one case, then time it."""
    problem = case.check()
    seconds = timer.seconds(case.run)
    floor = ceilings.floor_s(case.bytes_moved, case.flops)
    return Row(
        name,
        problem or "ok",
        us=1e6 * seconds,
        gbytes_per_s=case.bytes_moved / seconds / 1e9,
        tflops_per_s=case.flops / seconds / 1e12 if case.flops else None,
        of_ceiling=floor / seconds,
        graph=timer.captured if timer.cuda else None,
    )


def guarded(name: str, work: Callable[[], Row | None]) -> Row | None:
    """The row of ``work``, or one that says how it failed. A broken kernel must leave the others' rows.

    A fault on the device ends the process's use of it: all later rows then say the same, and the first tells.
    """
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - the edge of every case
        return Row(name, f"FAILED: {type(error).__name__}: {str(error).strip()[:300]}".replace("\n", " "))


def run_cases(
    makers: Iterator[tuple[str, CaseMaker]], report: Report, timer: Timer, ceilings: Ceilings, until: float
) -> None:
    """Every case in turn while there is time; memory is given back between them."""
    for name, make in makers:
        if time.monotonic() > until:
            report.add(Row(name, "no time left"))
            continue
        row = guarded(name, lambda name=name, make=make: measure(name, make(), timer, ceilings))  # type: ignore[misc]
        if row is not None:
            report.add(row)
        gc.collect()
        if timer.cuda:
            torch.cuda.empty_cache()


def run_steps(report: Report, timer: Timer, device: str, shapes: Shapes, until: float) -> None:
    """Whole layers and steps; each group of times stands or falls on its own."""
    made = Weights(shapes, device)
    for name, group in (("prefill", time_prefill), ("decoder replay", time_replay), ("decode", time_decode)):

        def times(group: StepTimes = group) -> Row | None:
            for what, seconds in group(shapes, made, timer, device):
                graph = timer.captured if timer.cuda else None
                report.add(Row(what, "ok", us=1e6 * seconds, graph=graph))
                if time.monotonic() > until:
                    return Row(what, "no time left")
            return None

        row = guarded(f"layers: {name}", times)
        if row is not None:
            report.add(row)


def run_model(report: Report, golden: Path, device: str, until: float, *, dry_run: bool) -> None:
    """Goldens, batch invariance and step times of the model as workers run it; not in a dry run, tests do that."""

    def rows() -> Row | None:
        from epdserve.loadtest.gpu.model import check_model  # its packages may be missing on a bare machine

        for what, measured, note in check_model(golden, device):
            right = not note.startswith("FAILED")
            report.add(
                Row(f"model: {what}: {measured}" + (f", {note}" if right else ""), "ok" if right else note)
            )
            if time.monotonic() > until:
                return Row("model", "no time left")
        return None

    if not dry_run:
        row = guarded("model", rows)
        if row is not None:
            report.add(row)


def main(
    device: Annotated[str, typer.Option(help="Torch device.")] = "cuda",
    dry_run: Annotated[bool, typer.Option(help="Tiny shapes on the CPU, in Triton's interpreter.")] = False,
    minutes: Annotated[float, typer.Option(help="No case starts after this long.")] = 7.0,
    only: Annotated[str, typer.Option(help="Cases whose name holds this.")] = "",
    golden: Annotated[Path, typer.Option(help="Folder of the tiny model's goldens.")] = Path(
        "tests/golden/tiny"
    ),
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the rows here.")] = None,
) -> None:
    """Check and time kernels, layers and the model on a device."""
    until = time.monotonic() + 60 * minutes
    shapes, device = (TINY, "cpu") if dry_run else (RELEASED, device)
    report = Report(device, json_file)
    torch.manual_seed(0)
    with torch.inference_mode():
        timer = Timer(device)
        ceilings = measure_ceilings(timer, device)
        report.add(Row("copy", "", gbytes_per_s=ceilings.bytes_per_s / 1e9))
        report.add(Row("bfloat16 product", "", tflops_per_s=ceilings.flops_per_s / 1e12))
        chosen = ((name, make) for name, make in case_makers(shapes, device) if only in name)
        run_cases(chosen, report, timer, ceilings, until)
        if not only:
            run_model(report, golden, device, until, dry_run=dry_run)
            run_steps(report, timer, device, shapes, until)
    if report.failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
