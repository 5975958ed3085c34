"""Decode rate of one process, the measure of the pools: ``python -m epdserve.services.local.bench MODEL_DIR``."""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from epdserve.model.costs import Rows, flop, read_weights
from epdserve.services.engine.config import EngineSettings
from epdserve.services.local.config import LocalSettings
from epdserve.services.local.engine import LocalEngine
from epdserve.services.types import SamplingParams


@dataclass(frozen=True, slots=True)
class DecodeRate:
    """Tokens a second while all of ``batch`` requests decode together."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    seconds: float
    tokens_per_s: float
    step_bytes: int  # float32 weights that a step reads, each once
    step_flop: int  # products of a step (model/costs.py)


def decode_rate(
    engine: LocalEngine, *, batch: int = 8, prompt_tokens: int = 128, new_tokens: int = 64, seed: int = 0
) -> DecodeRate:
    """Measure a full batch from the first token of the last request to the last token of the first.

    Args:
        engine: With nothing else to do.
        batch: Requests.
        prompt_tokens: Of each; random ids, different in each.
        new_tokens: Drawn greedily by each.
        seed: Of the prompts.
    """
    draw = np.random.default_rng(seed)
    vocabulary = engine.decode_runner.backbone.config.text.vocab_size
    prompts = [draw.integers(vocabulary // 2, vocabulary - 1, prompt_tokens) for _ in range(batch)]
    sampling = SamplingParams(seed=0, max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    times: list[list[float]] = [[] for _ in prompts]
    engine.generate(prompts, sampling, on_tokens=lambda index, _: times[index].append(time.monotonic()))
    began, ended = max(each[0] for each in times), min(each[-1] for each in times)
    tokens = sum(began < moment <= ended for each in times for moment in each)
    config = engine.decode_runner.backbone.config
    rows = Rows(batch, batch, batch, prompt_tokens + new_tokens // 2, scores_all=True)
    return DecodeRate(
        batch,
        prompt_tokens,
        new_tokens,
        ended - began,
        tokens / (ended - began),
        4 * read_weights(config),
        sum(flop(config, rows).values()),
    )


def main() -> None:
    """Print one line of JSON for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    engine = EngineSettings(model_dir=args.model_dir, threads=args.threads)
    with LocalEngine(args.model_dir, LocalSettings(engine=engine)) as local:
        decode_rate(local, batch=2, new_tokens=4, seed=1)  # first steps pay for what is built once
        for batch in args.batch:
            rate = decode_rate(
                local,
                batch=batch,
                prompt_tokens=args.prompt_tokens,
                new_tokens=args.new_tokens,
                seed=batch + 2,
            )
            print(json.dumps(asdict(rate)))


if __name__ == "__main__":
    main()
