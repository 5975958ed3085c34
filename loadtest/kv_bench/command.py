"""``python -m epdserve.loadtest.kv_bench``: what the KV store costs over what the machine can do at all.

    python -m epdserve.loadtest.kv_bench [--json FILE] [--only NAME]... [--recovery-gb GB] [--traces FOLDER]
        [--peers PYTHON]

Every row stands beside a raw floor measured in the same run, in turns with it. Prints one Markdown table; exit status 1
if a target is missed and ``--strict`` is given.
"""

import datetime
import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer
from epdserve.loadtest.kv_bench import index, memory, nixl, peers, recovery, replay, ssd
from epdserve.loadtest.kv_bench.row import Row, Rows


@dataclass(frozen=True, slots=True)
class Options:
    """What groups may ask about."""

    recovery_gb: float = 1.0
    traces: Path | None = None
    peers: Path | None = None


GROUPS: Final[dict[str, Callable[[Options], Rows]]] = {
    "memory": lambda _: memory.measure(),
    "ssd": lambda _: ssd.measure(),
    "peers": lambda options: peers.measure(options.peers),
    "nixl": lambda _: nixl.measure(),
    "index": lambda _: index.measure(),
    "recovery": lambda options: recovery.measure(options.recovery_gb),
    "replay": lambda options: replay.measure(options.traces),
}


def machine() -> str:
    """Processor, cores and system in words."""
    model = platform.processor() or "unknown processor"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    cores = len(os.sched_getaffinity(0))
    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{model}, {cores} cores, load {load}, Linux {platform.release()}, Python {platform.python_version()}"
    )


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the rows here.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help=f"A group of rows: {', '.join(GROUPS)}. May be repeated.")
    ] = None,
    recovery_gb: Annotated[
        float, typer.Option(min=0.01, help="Size of the tier that is recovered; the target is for 10.")
    ] = 1.0,
    traces: Annotated[
        Path | None, typer.Option(help="Folder with mooncake_*.jsonl.gz to replay as well.", file_okay=False)
    ] = None,
    peers: Annotated[
        Path | None, typer.Option(help="Python of an environment with Mooncake and LMCache.", dir_okay=False)
    ] = None,
    strict: Annotated[bool, typer.Option(help="Exit with status 1 if a target is missed.")] = False,
) -> None:
    """Measure, and print one table."""
    names = only or list(GROUPS)
    if unknown := [name for name in names if name not in GROUPS]:
        raise typer.BadParameter(f"no group {unknown[0]!r}; there are {', '.join(GROUPS)}")
    head = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, {machine()}"
    typer.echo(f"{head}\n\n| what | measured | floor | ratio | target |\n|---|---|---|---|---|")
    options = Options(recovery_gb, traces, peers)
    rows: list[Row] = []
    for name in names:
        for row in GROUPS[name](options):
            typer.echo("| " + " | ".join(row.cells()) + " |")
            rows.append(row)
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": head, "rows": [row.as_json() for row in rows]}, indent=1))
    if strict and any(row.met is False for row in rows):
        raise typer.Exit(1)
