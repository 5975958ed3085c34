"""``python -m epdserve.loadtest.foundation``: what disaggregation costs, as ratios measured in one run.

Decode through the pools against the same tokens in one process; time that the router adds; the hand-off of a long
prompt against a plain copy of the same bytes. The load client's own work is in every figure of the server.
"""

import asyncio
import json
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from epdserve.loadtest.figures import Spread
from epdserve.loadtest.floor import Floor, measure, memcpy_s
from epdserve.loadtest.probes import Plan, measure_one_process, measure_server
from epdserve.loadtest.server import command, running_server

DEFAULT = Plan()


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured. Rates in tokens a second, times in milliseconds."""

    floor: Floor
    one_process_tokens_per_s: float
    pools_tokens_per_s: float
    same_text: bool
    client_ttft_ms: Spread
    client_itl_ms: Spread
    added_ms: Spread
    http_ms: Spread
    router_ms: Spread
    prepare_ms: Spread
    handoff_ms: Spread
    handoff_bytes: int
    handoff_memcpy_ms: float

    @property
    def decode_ratio(self) -> float:
        """Pools against one process; 1 is no loss."""
        return self.pools_tokens_per_s / self.one_process_tokens_per_s

    @property
    def handoff_limit_ms(self) -> float:
        """What the hand-off may take: two copies and ten milliseconds."""
        return 2 * self.handoff_memcpy_ms + 10

    def rows(self) -> list[tuple[str, str, str]]:
        """Figure, value, target."""
        return [
            ("memcpy, one thread", f"{self.floor.memcpy_gb_per_s:.1f} GB/s", ""),
            (
                f"fp32 GEMM 1024, {self.floor.threads} threads",
                f"{self.floor.gemm_gflop_per_s:.0f} GFLOP/s",
                "",
            ),
            ("decode, one process", f"{self.one_process_tokens_per_s:.0f} tokens/s", ""),
            ("decode, through the pools", f"{self.pools_tokens_per_s:.0f} tokens/s", ""),
            ("pools / one process", f"{self.decode_ratio:.2f}", ">= 0.7"),
            ("same text", "yes" if self.same_text else "no", "yes"),
            (
                "TTFT at the client, p50 / p99",
                _two(self.client_ttft_ms),
                "",
            ),
            (
                "ITL at the client, p50 / p99",
                _two(self.client_itl_ms),
                "",
            ),
            ("router, p50 / p99", _two(self.router_ms), "<= 3 ms p50"),
            ("of it until the prefill is sent, p50 / p99", _two(self.prepare_ms), ""),
            ("not the workers', p50 / p99", _two(self.added_ms), ""),
            ("of it client and HTTP alone, p50 / p99", _two(self.http_ms), ""),
            ("hand-off", f"{self.handoff_bytes / 1e6:.2f} MB", ""),
            ("memcpy of the same bytes", f"{self.handoff_memcpy_ms:.2f} ms", ""),
            (
                "hand-off, p50 / worst",
                f"{self.handoff_ms.p50:.2f} / {self.handoff_ms.worst:.2f} ms",
                f"<= {self.handoff_limit_ms:.1f} ms",
            ),
        ]

    def as_json(self) -> dict[str, Any]:
        """The same, for machines."""
        return {**asdict(self), "decode_ratio": self.decode_ratio, "handoff_limit_ms": self.handoff_limit_ms}


def main(
    model: Annotated[
        Path, typer.Option(help="Model directory; written with the demo model if absent.")
    ] = Path(".demo-model"),
    batch: Annotated[
        int, typer.Option(min=1, help="Streams at a time in the decode comparison.")
    ] = DEFAULT.batch,
    answer_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of each of these.")
    ] = DEFAULT.answer_tokens,
    handoff_tokens: Annotated[
        int, typer.Option(min=64, help="Prompt of the hand-off.")
    ] = DEFAULT.handoff_tokens,
    rounds: Annotated[
        int, typer.Option(min=1, help="Runs of each side; the median counts.")
    ] = DEFAULT.rounds,
    threads: Annotated[int, typer.Option(min=1, help="Arithmetic threads, on both sides.")] = DEFAULT.threads,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure, and print one table. Starts and stops its own server."""
    plan = Plan(
        batch=batch,
        answer_tokens=answer_tokens,
        handoff_tokens=handoff_tokens,
        rounds=rounds,
        threads=threads,
    )
    with tempfile.TemporaryDirectory(prefix="epdserve-") as scratch:
        result = run(plan, model.absolute(), Path(scratch))
    if as_json:
        print(json.dumps(result.as_json()))
        return
    print("| figure | value | target |\n|---|---|---|")
    for row in result.rows():
        print("| " + " | ".join(row) + " |")


def run(plan: Plan, model_dir: Path, scratch: Path) -> Result:
    """All measurements.

    Raises:
        CommandFailedError: The server or ``generate`` failed.
        RuntimeError: A request failed.
    """
    if not model_dir.is_dir():
        command("demo-model", str(model_dir), "--random-weights", threads=plan.threads)
    config = scratch / "threads.toml"
    config.write_text(
        "".join(f"[{role}.engine]\nthreads = {plan.threads}\n" for role in ("prefill", "decode"))
    )
    arguments = ("--model", str(model_dir), "--config", str(config))
    with running_server(scratch / "up", *arguments, threads=plan.threads) as server:
        seen = asyncio.run(measure_server(plan, server))
    one_process, texts = measure_one_process(plan, model_dir, scratch)
    return Result(
        floor=measure(threads=plan.threads),
        one_process_tokens_per_s=one_process,
        pools_tokens_per_s=seen.tokens_per_s,
        same_text=[outcome.text for outcome in seen.together] == texts,
        client_ttft_ms=_spread_ms(outcome.ttft_s for outcome in seen.together),
        client_itl_ms=_spread_ms(outcome.itl_s for outcome in seen.together),
        added_ms=_spread_ms(seen.added_s),
        http_ms=_spread_ms(seen.http_s),
        router_ms=_spread_ms(seen.router_s),
        prepare_ms=_spread_ms(seen.prepare_s),
        handoff_ms=_spread_ms(seen.handoff_s),
        handoff_bytes=seen.handoff_bytes,
        handoff_memcpy_ms=memcpy_s(seen.handoff_bytes) * 1e3,
    )


def _two(spread: Spread) -> str:
    return f"{spread.p50:.2f} / {spread.p99:.2f} ms"


def _spread_ms(seconds: Iterable[float | None]) -> Spread:
    spread = Spread.of(None if value is None else value * 1e3 for value in seconds)
    if spread is None:
        raise RuntimeError("nothing was measured")
    return spread


if __name__ == "__main__":
    typer.run(main)
