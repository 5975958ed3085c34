"""Ways to compute a prompt: what serving leaves out or rounds, one at a time, and what no server may do.

Rows run through ``Backbone`` over real pages, as in a worker.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from epdserve.model.backbone import Backbone
from epdserve.model.batch import Outputs, Segment
from epdserve.model.compressed_tokens import load_or_derive_token_map
from epdserve.model.config import ModelConfig
from epdserve.model.demo.training.cases import BLOCK, Case
from epdserve.model.logits import LogitsPlan, LogitsRun
from epdserve.model.precision import Precision
from epdserve.model.replay import PrefillSpan, plan_prefill
from epdserve.model.weights import load_weights

_EVERYTHING: Final = 4096  # entries, or blocks of them: as many as the longest case has


@dataclass(frozen=True, slots=True)
class Way:
    """How a prompt is computed.

    Attributes:
        name: Of the row in a table.
        precision: Number formats of caches and products.
        hit: A prefix of a length drawn at random is found, as blocks; the window before its end is replayed.
        cut: The prefix ends so that replay begins at the value that is asked for, in a case that has such a place.
        tail: The prefix is found with a tail, at any token: nothing is replayed.
        decoder_replay: Layers above the cut run on the prompt's last window.
        rewrites: Replayed rows write their entries again. Wrong on purpose.
        settings: Of the text config, instead of the model's own.
    """

    name: str
    precision: Precision = Precision.F32Q
    hit: bool = False
    cut: bool = False
    tail: bool = False
    decoder_replay: bool = False
    rewrites: bool = False
    settings: tuple[tuple[str, int], ...] = ()


WAYS: Final = (
    Way("exact"),
    Way("encoder replay", hit=True),
    Way("decoder replay", decoder_replay=True),
    Way("both replays", hit=True, decoder_replay=True),
    Way("tail, decoder replay", hit=True, tail=True, decoder_replay=True),
    Way("caches not rounded", Precision.F32),
    Way("bfloat16, FP8 products, both replays", Precision.NATIVE, hit=True, decoder_replay=True),
    Way("no candidate pool", settings=(("candidate_topk_blocks", _EVERYTHING),)),
    Way("all entries", settings=(("candidate_topk_blocks", _EVERYTHING), ("index_topk", _EVERYTHING))),
    Way("encoder replay from the asked value on", hit=True, cut=True),
    Way("the same, rewriting entries (wrong)", hit=True, cut=True, rewrites=True),
    Way("both replays from the asked value on", hit=True, cut=True, decoder_replay=True),
)


class Models:
    """One backbone for every precision and config that ways ask for."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._loaded = directory, dict[Any, Backbone]()

    def of(self, way: Way) -> Backbone:
        """The backbone of a way."""
        key = (way.precision, way.settings)
        if key not in self._loaded:
            config = ModelConfig.from_directory(self._directory)
            token_map = torch.from_numpy(load_or_derive_token_map(self._directory, config))
            weights = load_weights(self._directory, config, "cpu")
            own = config.model_copy(
                update={"text": config.text.model_copy(update=dict(way.settings))}, deep=True
            )
            self._loaded[key] = Backbone(own, weights, token_map, way.precision)
        return self._loaded[key]


def is_right(backbone: Backbone, case: Case, way: Way, seed: str) -> bool:
    """Whether greedy decoding gives the answer: its tokens are run in one step, and each must be the likeliest."""
    ids = np.array([*case.prompt, *case.answer[:-1]], dtype=np.int64)
    plan = LogitsPlan(prefill=len(case.prompt))
    run = LogitsRun(backbone, ids, plan, block_tokens=BLOCK)
    out_TV = torch.full((len(ids), backbone.config.text.vocab_size), float("nan"))
    _prefill(run, way, len(case.prompt), _hit(case, way, random.Random(seed)), out_TV)
    if len(ids) > len(case.prompt):
        rest = len(ids) - len(case.prompt)
        run.step(Segment(run.ids, len(case.prompt), rest, run.pages, 0, outputs=Outputs.ALL), out_TV)
    return out_TV[len(case.prompt) - 1 :].argmax(-1).tolist() == list(case.answer)


def _hit(case: Case, way: Way, draw: random.Random) -> int:
    """Tokens found; 0 if the prompt is too short for a hit that counts."""
    most = len(case.prompt) - 1
    if not way.hit or most < 3 * BLOCK:
        return 0
    if way.cut and case.cut:
        return case.cut
    return draw.randint(2 * BLOCK, most) if way.tail else BLOCK * draw.randint(2, most // BLOCK)


def _prefill(run: LogitsRun, way: Way, prompt: int, hit: int, out_TV: torch.Tensor) -> None:
    window = run.backbone.config.text.sliding_window
    if hit:
        # An earlier request leaves its entries, and with a tail the state of its last rows too
        _run_span(
            run,
            plan_prefill(prompt_tokens=hit, hit_tokens=0, window=window),
            way,
            hit,
            out_TV,
            slot=not way.tail,
        )
    span = plan_prefill(prompt_tokens=prompt, hit_tokens=hit, window=window, has_tail=way.tail and hit > 0)
    if way.rewrites:
        span = replace(span, publish_from=span.first_row)
    _run_span(run, span, way, prompt, out_TV, slot=0)


def _run_span(
    run: LogitsRun, span: PrefillSpan, way: Way, prompt: int, out_TV: torch.Tensor, *, slot: int
) -> None:
    if not way.decoder_replay:
        span = replace(span, decoder_from=span.first_row, decoder_floor=span.encoder_floor)
    pieces = [span.first_row, prompt]
    if span.first_row < span.decoder_from < prompt:
        pieces.insert(1, span.decoder_from)
    for start, end in pairwise(pieces):
        segment = Segment(
            run.ids,
            start,
            end - start,
            run.pages,
            int(slot),
            encoder_floor=span.encoder_floor,
            decoder_from=span.decoder_from,
            decoder_floor=span.decoder_floor,
            publish_from=span.publish_from,
            outputs=Outputs.LAST if end == prompt else Outputs.NONE,
        )
        run.step(segment, out_TV)
