"""``python -m epdserve.loadtest.pool_fit``: the simulator beside real pools of this machine.

Steps are fitted at some loads; others, run in turns with these on the same pools so that the machine is the same, are
then simulated with the same requests at the same times.
"""

import asyncio
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from epdserve.loadtest.client import Outcome
from epdserve.loadtest.pool_bench import pools
from epdserve.loadtest.pool_load import Targets, closed_loop, open_loop
from epdserve.loadtest.simulator.fitted import FittedTiming, Seen, fit, measured, simulated

_ANY: Final = Targets(60.0, 60.0)  # nobody is refused
_FITTED: Final = (
    "link_latency_s",
    "prefill_fixed_s",
    "prefill_token_s",
    "decode_fixed_s",
    "decode_request_s",
    "prefill_beside",
    "decode_beside",
)
_WORKERS: Final = (1, 1)


def main(
    seconds: Annotated[float, typer.Option(min=5.0, help="Of arrivals, for each load and turn.")] = 15.0,
    turns: Annotated[int, typer.Option(min=1, help="How often each load is run.")] = 2,
    fit_at: Annotated[list[float] | None, typer.Option(help="Loads of the fit, over capacity.")] = None,
    loads: Annotated[list[float] | None, typer.Option(help="Loads to check.")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Where what clients saw is written, to be fitted again.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Checkpoint; absent = the demo model.")] = None,
) -> None:
    """Print one JSON object a row: the fit, then for each load what was measured, simulated, and their ratio."""
    fitted, held_out = fit_at or [0.5, 0.8], loads or [0.35, 0.65]
    with (
        tempfile.TemporaryDirectory(prefix="pool-fit-") as folder,
        pools(Path(folder) / "up", _ANY, workers=_WORKERS, model=model) as url,
    ):
        capacity = asyncio.run(closed_loop(url, clients=16, seconds=8.0, seed=99))
        legs: list[tuple[float, bool, list[Outcome]]] = []
        for turn in range(turns):
            for number, load in enumerate(_mixed(fitted, held_out)):
                rate, seed = load * capacity, 100 * turn + number
                leg = open_loop(url, "", rate=rate, seconds=seconds, targets=_ANY, seed=seed, shared=False)
                legs.append((load, load in held_out, asyncio.run(leg)[1]))
    if keep is not None:
        kept = [(load, held, [asdict(one) for one in outcomes]) for load, held, outcomes in legs]
        keep.write_text(json.dumps({"capacity": capacity, "legs": kept}))
    timing = fit([one for _, held, outcomes in legs if not held for one in outcomes])
    told = {name: round(value, 6) for name, value in asdict(timing).items() if name in _FITTED}
    print(json.dumps({"capacity": round(capacity, 2), "fitted": told}), flush=True)
    for load in sorted({load for load, _, _ in legs}):
        mine = [outcomes for at, _, outcomes in legs if at == load]
        print(json.dumps({"load": load, "held_out": load in held_out, **_beside(mine, timing)}), flush=True)


def _mixed(fitted: list[float], held_out: list[float]) -> list[float]:
    """One of each by turns."""
    longest = max(len(fitted), len(held_out))
    return [loads[at] for at in range(longest) for loads in (fitted, held_out) if at < len(loads)]


def _beside(legs: list[list[Outcome]], timing: FittedTiming) -> dict[str, object]:
    """Of all turns of a load: the mean of what each measured, and of what each would have by the simulator."""
    real = [measured(outcomes) for outcomes in legs]
    virtual = [simulated(outcomes, timing, prefills=_WORKERS[0], decodes=_WORKERS[1]) for outcomes in legs]
    row: dict[str, object] = {
        "requests": sum(map(len, legs)),
        "failed": sum(not o.ok for leg in legs for o in leg),
    }
    for name in asdict(real[0]):
        one, other = _mean(real, name), _mean(virtual, name)
        row[name] = {"measured": round(one, 4), "simulated": round(other, 4), "ratio": round(other / one, 3)}
    return row


def _mean(seen: list[Seen], name: str) -> float:
    return sum(float(getattr(one, name)) for one in seen) / len(seen)


if __name__ == "__main__":
    typer.run(main)
