"""``python -m epdserve.loadtest.pool_fit``: the simulator beside real pools of this machine.

Steps are fitted at one load; other loads are then run for real and simulated with the same requests at the same times.
"""

import asyncio
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from epdserve.loadtest.pool_bench import pools
from epdserve.loadtest.pool_load import Targets, closed_loop, open_loop
from epdserve.loadtest.simulator.fitted import Seen, fit, measured, simulated

_ANY: Final = Targets(60.0, 60.0)  # nobody is refused
_FITTED: Final = (
    "link_latency_s",
    "prefill_fixed_s",
    "prefill_token_s",
    "decode_fixed_s",
    "decode_request_s",
)


def main(
    seconds: Annotated[float, typer.Option(min=5.0, help="Of arrivals, for each load.")] = 30.0,
    fit_at: Annotated[float, typer.Option(help="Load of the fit, over capacity.")] = 0.5,
    loads: Annotated[list[float] | None, typer.Option(help="Loads to check.")] = None,
    model: Annotated[Path | None, typer.Option(help="Checkpoint; absent = the demo model.")] = None,
) -> None:
    """Print one JSON object a row: the fit, then for each load what was measured, simulated, and their ratio."""
    workers = (1, 1)
    with (
        tempfile.TemporaryDirectory(prefix="pool-fit-") as folder,
        pools(Path(folder) / "up", _ANY, workers=workers, model=model) as url,
    ):
        capacity = asyncio.run(closed_loop(url, clients=16, seconds=seconds / 2, seed=99))
        for number, load in enumerate([fit_at, *(loads or (0.3, 0.8))]):
            leg, outcomes = asyncio.run(
                open_loop(
                    url, "", rate=load * capacity, seconds=seconds, targets=_ANY, seed=number, shared=False
                )
            )
            if not number:
                timing = fit(outcomes)
                fitted = {name: round(value, 6) for name, value in asdict(timing).items() if name in _FITTED}
                print(json.dumps({"capacity": round(capacity, 2), "fitted": fitted}), flush=True)
            real = measured(outcomes)
            virtual = simulated(outcomes, timing, prefills=workers[0], decodes=workers[1])
            row = {"load": load, "held_out": number > 0, "requests": leg.requests, "failed": leg.failed}
            print(json.dumps(row | _beside(real, virtual)), flush=True)


def _beside(real: Seen, virtual: Seen) -> dict[str, object]:
    pairs = {name: (value, getattr(virtual, name)) for name, value in asdict(real).items()}
    return {
        name: {"measured": round(one, 4), "simulated": round(other, 4), "ratio": round(other / one, 3)}
        for name, (one, other) in pairs.items()
    }


if __name__ == "__main__":
    typer.run(main)
