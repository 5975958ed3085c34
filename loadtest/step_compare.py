"""``python -m epdserve.loadtest.step_compare BASE OURS``: the decode step of two source trees, in turn, in one run.

Each round starts processes of each tree, in changing order, that decode a full batch of the demo model
(``services.local.bench``), one of them so many steps longer than the other: their processor seconds differ by the
steps' alone. Processor time leaves other work out where cores are shared, and a round's ratio is steadier than
either rate. A tree is a folder that holds ``services/`` and ``kernels/``: a git worktree, say.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from epdserve.loadtest.floor import Floor, measure

_BENCH = ("-m", "epdserve.services.local.bench")
_WRITE = "import sys; from epdserve.model.demo.writer import write_demo_model; write_demo_model(sys.argv[1])"
_DEADLINE_S = 300.0
_SHORT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tokens a processor second of every round, of one thread at one batch size."""

    batch: int
    base: list[float]
    ours: list[float]
    floor: Floor
    step_bytes: int
    step_flop: int

    @property
    def ratios(self) -> list[float]:
        """Ours over base, by round."""
        return [ours / base for ours, base in zip(self.ours, self.base, strict=True)]

    @property
    def floor_ms(self) -> float:
        """What a step takes at least: its bytes at the speed of a copy (read and write), or its products."""
        read_s = self.step_bytes / (2e9 * self.floor.memcpy_gb_per_s)
        return 1e3 * max(read_s, self.step_flop / (1e9 * self.floor.gemm_gflop_per_s))

    def rows(self) -> list[tuple[str, str]]:
        """Figure and value."""
        ours = statistics.median(self.ours)
        step_ms = 1e3 * self.batch / ours
        ratios = sorted(self.ratios)
        return [
            ("base, tokens a processor second", f"{statistics.median(self.base):.0f}"),
            ("ours, tokens a processor second", f"{ours:.0f}"),
            ("ours / base, median of rounds", f"{statistics.median(ratios):.2f}"),
            ("least and most", f"{ratios[0]:.2f} to {ratios[-1]:.2f}"),
            ("step", f"{step_ms:.2f} ms"),
            (
                "floor of a step",
                f"{self.floor_ms:.2f} ms: {self.step_bytes / 1e6:.1f} MB, {self.step_flop / 1e6:.0f} MFLOP",
            ),
            ("fraction of the floor", f"{self.floor_ms / step_ms:.2f}"),
        ]


def compare(base: Path, ours: Path, *, batch: int, rounds: int, new_tokens: int) -> Comparison:
    """Run both trees in turn; the floor is measured between them, with one thread as they have."""
    with tempfile.TemporaryDirectory() as work:
        homes = {"base": _home(Path(work) / "base", base), "ours": _home(Path(work) / "ours", ours)}
        model = str(Path(work) / "model")
        _python(homes["ours"], "-c", _WRITE, model)
        rates: dict[str, list[float]] = {"base": [], "ours": []}
        last: dict[str, float] = {}
        for number in range(rounds):
            for name in ("base", "ours") if number % 2 == 0 else ("ours", "base"):
                short_s, _ = _bench(homes[name], model, batch, _SHORT_TOKENS)
                long_s, told = _bench(homes[name], model, batch, _SHORT_TOKENS + new_tokens)
                rates[name].append(batch * new_tokens / (long_s - short_s))
                last = told if name == "ours" else last
        return Comparison(
            batch,
            rates["base"],
            rates["ours"],
            measure(threads=1),
            int(last["step_bytes"]),
            int(last["step_flop"]),
        )


def _bench(home: Path, model: str, batch: int, new_tokens: int) -> tuple[float, dict[str, float]]:
    """Processor seconds of one run, and what it says."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    told = json.loads(_python(home, *_BENCH, model, "--batch", str(batch), "--new-tokens", str(new_tokens)))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime), told


def _home(folder: Path, tree: Path) -> Path:
    """A folder in which ``epdserve`` is the tree."""
    if not (tree / "services").is_dir():
        raise typer.BadParameter(f"{tree} holds no services/")
    folder.mkdir()
    (folder / "epdserve").symlink_to(tree.resolve(), target_is_directory=True)
    return folder


def _python(home: Path, *arguments: str) -> str:
    """Standard output of a process in which ``epdserve`` is found in ``home``."""
    env = {**os.environ, "PYTHONPATH": str(home), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], env=env, check=True, capture_output=True, text=True, timeout=_DEADLINE_S
    )
    return done.stdout


def main(
    base: Annotated[Path, typer.Argument(help="The tree to compare with.")],
    ours: Annotated[Path, typer.Argument(help="The tree in question.")],
    batch: Annotated[int, typer.Option(min=1, help="Requests that decode together.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of runs.")] = 5,
    new_tokens: Annotated[int, typer.Option(min=8, help="Steps that are compared.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decode rate of two source trees, in turn, and what the machine could do."""
    result = compare(base, ours, batch=batch, rounds=rounds, new_tokens=new_tokens)
    if as_json:
        print(json.dumps(asdict(result)))
        return
    for name, value in result.rows():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    typer.run(main)
