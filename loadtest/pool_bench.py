"""``python -m epdserve.loadtest.pool_bench``: placement and admission on real pools, beside round robin.

Each policy gets a server of its own with the same workers, the same requests at the same times, and 1.5 times what the
pools were seen to serve. Round robin refuses nothing, as nothing in it could.
"""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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
    seconds: Annotated[float, typer.Option(min=5.0, help="Of arrivals, for each policy.")] = 30.0,
    overload: Annotated[float, typer.Option(help="Offered over capacity.")] = 1.5,
    ttft_s: Annotated[float, typer.Option(help="Target.")] = 2.0,
    tpot_s: Annotated[float, typer.Option(help="Target.")] = 0.2,
    seed: Annotated[int, typer.Option()] = 1,
    model: Annotated[Path | None, typer.Option(help="Checkpoint; absent = the demo model.")] = None,
) -> None:
    """Print one JSON object a row: the capacity, then each policy."""
    targets = Targets(ttft_s, tpot_s)
    with tempfile.TemporaryDirectory(prefix="pool-bench-") as folder:
        rate = 0.0
        for number, (name, placement, refuse) in enumerate(POLICIES):
            place = Path(folder) / str(number)
            with pools(place, targets, placement=placement, refuse=refuse, model=model) as url:
                if not rate:
                    capacity = asyncio.run(
                        closed_loop(url, clients=32, seconds=seconds * 0.75, seed=seed + 1)
                    )
                    print(json.dumps({"capacity_requests_per_s": round(capacity, 2)}), flush=True)
                    rate = overload * capacity
                leg, _ = asyncio.run(
                    open_loop(url, name, rate=rate, seconds=seconds, targets=targets, seed=seed)
                )
                print(json.dumps(asdict(leg)), flush=True)


if __name__ == "__main__":
    typer.run(main)
