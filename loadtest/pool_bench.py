"""``python -m epdserve.loadtest.pool_bench``: placement and admission on real pools, beside round robin.

Each policy has a server of its own with the same workers; all of them stand ready, and take turns: in each round every
policy gets the same requests at the same times, 1.5 times what round robin served in a closed loop at the start of the
same run. Every request counts, those of the first seconds, when nothing waits yet, too. Round robin refuses
nothing, as nothing in it could.
"""

import asyncio
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from epdserve.loadtest.pool_load import Targets, closed_loop, open_loop, warm
from epdserve.loadtest.server import running_server

# Name, how workers are chosen, whether what would be late is refused
POLICIES: Final = (
    ("round robin", "round_robin", False),
    ("placement by cost", "cost", False),
    ("placement by cost, late ones refused", "cost", True),
)
_CAPACITY_S: Final = 8.0
_WARM_S: Final = 6.0
_DRAWS: Final = 2000
_CONFIG: Final = """
[machine]
prefill_workers = {prefills}
decode_workers = {decodes}
store = false
[router]
placement = "{placement}"
[router.slo]
ttft_target_s = {ttft_s}
tpot_target_s = {tpot_s}
refuse_late = {refuse}
[prefill.engine.store]
enabled = false
[decode.engine.store]
enabled = false
"""


@contextmanager
def pools(
    folder: Path,
    targets: Targets,
    *,
    placement: str = "cost",
    refuse: bool = False,
    workers: tuple[int, int] = (2, 2),
    model: Path | None = None,
) -> Iterator[str]:
    """A server with so many prefill and decode workers, one thread each, until the block ends; its address."""
    folder.mkdir()
    config = folder / "up.toml"
    config.write_text(
        _CONFIG.format(
            placement=placement,
            refuse=str(refuse).lower(),
            prefills=workers[0],
            decodes=workers[1],
            **asdict(targets),
        )
    )
    arguments = ["--config", str(config), *(["--model", str(model)] if model else [])]
    with running_server(folder / "state", *arguments, threads=1) as state:
        asyncio.run(warm(state["url"]))
        yield str(state["url"])


def main(
    seconds: Annotated[float, typer.Option(min=5.0, help="Of arrivals, for each leg.")] = 15.0,
    rounds: Annotated[int, typer.Option(min=2, help="Each runs every policy once.")] = 4,
    overload: Annotated[float, typer.Option(help="Offered over capacity.")] = 1.5,
    ttft_s: Annotated[float, typer.Option(help="Target.")] = 2.0,
    tpot_s: Annotated[float, typer.Option(help="Target.")] = 0.2,
    seed: Annotated[int, typer.Option()] = 1,
    policies: Annotated[list[str] | None, typer.Option(help="Some of them; absent = first and last.")] = None,
    model: Annotated[Path | None, typer.Option(help="Checkpoint; absent = the demo model.")] = None,
) -> None:
    """Print one JSON object a row: the capacity, each leg, then what each policy has over the first one."""
    targets = Targets(ttft_s, tpot_s)
    chosen = [one for one in POLICIES if one[0] in (policies or (POLICIES[0][0], POLICIES[-1][0]))]
    met: dict[str, list[int]] = {name: [] for name, _, _ in chosen}
    with tempfile.TemporaryDirectory(prefix="pool-bench-") as folder, ExitStack() as held:
        urls = {}
        for number, (name, placement, refuse) in enumerate(chosen):
            place = Path(folder) / str(number)
            server = pools(place, targets, placement=placement, refuse=refuse, model=model)
            urls[name] = held.enter_context(server)
        # Of the first, which refuses nobody: whom others refuse would ask again at once
        capacity = asyncio.run(
            closed_loop(next(iter(urls.values())), clients=32, seconds=_CAPACITY_S, seed=seed)
        )
        print(json.dumps({"capacity_requests_per_s": round(capacity, 2)}), flush=True)
        for name in list(urls)[1:]:
            warming = open_loop(
                urls[name], name, rate=0.7 * capacity, seconds=_WARM_S, targets=targets, seed=seed
            )
            asyncio.run(warming)
        for number in range(rounds):
            # Every second round in the other order
            for name in list(urls)[:: 1 if number % 2 == 0 else -1]:
                legs = open_loop(
                    urls[name],
                    name,
                    rate=overload * capacity,
                    seconds=seconds,
                    targets=targets,
                    seed=seed + 1 + number,
                )
                leg, _ = asyncio.run(legs)
                met[name].append(leg.met)
                print(json.dumps({"round": number, **asdict(leg)}), flush=True)
    first, *others = met.values()
    for name, theirs in zip(list(met)[1:], others, strict=True):
        low, high = interval(theirs, first)
        row = {"policy": name, "over": next(iter(met)), "ratio": round(sum(theirs) / max(1, sum(first)), 3)}
        print(json.dumps({**row, "interval_95": [round(low, 3), round(high, 3)]}), flush=True)


def interval(theirs: Sequence[int], ours: Sequence[int]) -> tuple[float, float]:
    """Middle 95 % of the ratio of sums over draws of rounds."""
    draw = random.Random(0)
    ratios = []
    for _ in range(_DRAWS):
        rounds = draw.choices(range(len(ours)), k=len(ours))
        ratios.append(sum(theirs[at] for at in rounds) / max(1, sum(ours[at] for at in rounds)))
    ratios.sort()
    return ratios[int(0.025 * _DRAWS)], ratios[int(0.975 * _DRAWS)]


if __name__ == "__main__":
    typer.run(main)
