"""Prefill rate in one process: ``python -m epdserve.services.local.prefill_bench``.

Three ways in turn, each prompt new: as served (layers above the cut run on the last window's rows only: decoder
replay), with every row in every layer, and deterministic. The model has 20 + 20 layers, the released window and cuts,
and few channels (``model/demo/narrow.py``). Ratios are of neighbouring runs, times those of the processor: with one
thread the clock's on an idle machine, and not other work's where cores are shared.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from epdserve.kvstore.clock import SystemClock
from epdserve.model.batch import Outputs
from epdserve.model.demo.narrow import narrow_backbone
from epdserve.model.replay import PrefillSpan
from epdserve.services.engine.config import EngineSettings
from epdserve.services.engine.onboard import onboard
from epdserve.services.engine.requests import RunningRequest
from epdserve.services.engine.runner import Part, Runner

WAYS: Final = ("served", "every row", "deterministic")
_NOTHING: Final = PrefillSpan(0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class PrefillRates:
    """Processor seconds of each prefill, by way and round."""

    prompt_tokens: int
    chunk_tokens: int
    seconds: dict[str, list[float]]

    def ratio(self, way: str) -> float:
        """Median over the rounds of a way's time against the served one's."""
        pairs = zip(self.seconds[way], self.seconds["served"], strict=True)
        return statistics.median(other / served for other, served in pairs)

    def rows(self) -> list[tuple[str, str]]:
        """Figure and value."""
        rates = [
            (f"{way}, tokens a processor second", f"{self.prompt_tokens / statistics.median(seconds):.0f}")
            for way, seconds in self.seconds.items()
        ]
        lost = 1 - 1 / self.ratio("deterministic")
        return [
            *rates,
            ("decoder replay on against off", f"{self.ratio('every row'):.2f} x"),
            ("deterministic: prefill throughput lost", f"{100 * lost:.1f} %"),
        ]


def prefill_rates(
    runner: Runner, *, prompt_tokens: int, chunk_tokens: int, rounds: int, seed: int = 0
) -> PrefillRates:
    """Measure; the order of the ways turns from round to round."""
    draw = np.random.default_rng(seed)
    vocabulary = runner.backbone.config.text.vocab_size - 1
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS[number % 3 :] + WAYS[: number % 3]:
            tokens = draw.integers(3, vocabulary, prompt_tokens)
            seconds[way].append(_prefill(runner, tokens, way, chunk_tokens))
    return PrefillRates(prompt_tokens, chunk_tokens, seconds)


def _prefill(runner: Runner, tokens: np.ndarray, way: str, chunk_tokens: int) -> float:
    request = RunningRequest(
        request_id=way,
        tokens=tokens,
        length=len(tokens),
        prompt_tokens=len(tokens),
        tenant_key=b"bench",
        exact=False,
        span=_NOTHING,
        every_row=way == "every row",
        cuts=runner.cuts if way == "deterministic" else None,
    )
    if not onboard(runner, request):
        raise ValueError(f"{runner.num_pages} pages do not hold {len(tokens)} tokens")
    began = time.process_time()
    while request.remaining_rows:
        rows = min(chunk_tokens, request.piece_rows)
        outputs = Outputs.LAST if rows == request.remaining_rows else Outputs.NONE
        runner.run([Part(request, rows, outputs)])
    ended = time.process_time()
    runner.release(request)
    return ended - began


def narrow_runner(prompt_tokens: int) -> Runner:
    """A runner over the narrow model with room for one prompt."""
    torch.set_num_threads(1)
    settings = EngineSettings(
        model_dir=Path(),
        block_tokens=128,
        num_pages=-(-prompt_tokens // 128) + 1,
        max_running=1,
        staging_slots=1,
    )
    return Runner(narrow_backbone(), settings, clock=SystemClock())


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--chunk-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    runner = narrow_runner(args.prompt_tokens)
    prefill_rates(
        runner, prompt_tokens=256, chunk_tokens=args.chunk_tokens, rounds=1
    )  # pays for what is built once
    rates = prefill_rates(
        runner, prompt_tokens=args.prompt_tokens, chunk_tokens=args.chunk_tokens, rounds=args.rounds
    )
    if args.json:
        print(json.dumps(asdict(rates)))
        return
    for name, value in rates.rows():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
