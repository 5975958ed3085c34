"""Simulate the cluster: search, compare, ablate, fairness, scale.

python -m epdserve.loadtest.simulator tune --tries 6 --out tuned.json
python -m epdserve.loadtest.simulator compare --tuned tuned.json --seeds 10 [--traces FOLDER]
python -m epdserve.loadtest.simulator ablate --tuned tuned.json --seeds 4
python -m epdserve.loadtest.simulator fairness --tuned tuned.json
python -m epdserve.loadtest.simulator scale
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from epdserve.loadtest.simulator.baselines import Parameters
from epdserve.loadtest.simulator.cluster import ClusterSpec
from epdserve.loadtest.simulator.figures import Figures
from epdserve.loadtest.simulator.ours import Ours, Parts
from epdserve.loadtest.simulator.run import Simulation
from epdserve.loadtest.simulator.study import Scenario, ablate, compare, makers, search, simulate
from epdserve.loadtest.simulator.tables import goodput_table, spread
from epdserve.loadtest.simulator.workloads import SHAPES, generate


def main() -> int:
    """Run one study and print its table."""
    arguments = _arguments()
    scenario = Scenario(load=arguments.load, traces=arguments.traces, length=arguments.length)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    tuned: dict[str, Parameters] = json.loads(arguments.tuned.read_text()) if arguments.tuned else {}
    tuned = tuned or {name: {} for name in makers()}
    if arguments.study == "tune":
        _tune(scenario, arguments.tries, arguments.out)
    elif arguments.study == "compare":
        print(goodput_table(scenario, _told(compare(scenario, tuned, seeds=seeds)), base=Ours.name))
    elif arguments.study == "ablate":
        print(goodput_table(scenario, _told(ablate(scenario, tuned[Ours.name], seeds=seeds)), base="all"))
    elif arguments.study == "fairness":
        _fairness(scenario, tuned[Ours.name], seeds)
    else:
        _scale(tuned[Ours.name])
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m epdserve.loadtest.simulator", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("study", choices=["tune", "compare", "ablate", "fairness", "scale"])
    parser.add_argument("--load", type=float, default=1.3, help="offered over capacity")
    parser.add_argument("--length", type=float, default=1.0, help="of a run, over the usual")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--tries", type=int, default=6, help="settings tried for each policy")
    parser.add_argument("--traces", type=Path, help="folder of the public traces")
    parser.add_argument("--tuned", type=Path, help="settings that tune wrote")
    parser.add_argument("--out", type=Path, help="where tune writes settings")
    return parser.parse_args()


def _tune(scenario: Scenario, tries: int, out: Path | None) -> None:
    found: dict[str, Parameters] = {}
    for name in makers():
        found[name], score = search(scenario, name, tries=tries)
        print(f"{name:20s} {score:.3f} of capacity with {found[name]}", flush=True)
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")


def _fairness(scenario: Scenario, parameters: Parameters, seeds: Iterable[int]) -> None:
    doubled = replace(scenario, load=2.0)
    print("| shape | Jain, with | without | goodput, with over without |\n|---|---|---|---|")
    for shape in SHAPES.values():
        fair, free = (
            [
                simulate(doubled, Ours(parameters, seed=seed, parts=Parts(fairness=on)), shape, seed)
                for seed in seeds
            ]
            for on in (True, False)
        )
        ratio = sum(one.goodput for one in fair) / sum(one.goodput for one in free)
        jains = [spread([one.fairness for one in figures], "{:.3f}") for figures in (fair, free)]
        print(f"| {shape.name} | {jains[0]} | {jains[1]} | {ratio:.3f} |", flush=True)


def _scale(parameters: Parameters) -> None:
    spec = ClusterSpec(prefills=600, decodes=400)
    shape = SHAPES["conversation"]
    workload = generate(shape, seconds=20.0, rate=500.0, seed=1)
    began_at, began_cpu_s = time.perf_counter(), time.process_time()
    run = Simulation(spec, Ours(parameters), workload).run()
    took_s, cpu_s = time.perf_counter() - began_at, time.process_time() - began_cpu_s
    print(
        f"1,000 workers, {len(run.requests)} requests in 20 s: "
        f"{took_s:.1f} s ({cpu_s:.1f} s of CPU) for {run.ended_at:.1f} s"
    )


def _told(rows: Iterable[tuple[str, str, int, Figures]]) -> Iterable[tuple[str, str, int, Figures]]:
    """The same rows, with progress on stderr."""
    for row in rows:
        name, shape, seed, figures = row
        print(f"seed {seed} {shape} {name}: {figures.goodput:.2f}/s", file=sys.stderr, flush=True)
        yield row


if __name__ == "__main__":
    sys.exit(main())
