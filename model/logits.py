"""Logits of every position of a token list, through the batch, pages and replay code that serves."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from epdserve.model.backbone import Backbone
from epdserve.model.batch import ForwardBatch, ImageSpan, IntArray, Outputs, Segment
from epdserve.model.pools import KVPools
from epdserve.model.precision import Precision
from epdserve.model.replay import PrefillSpan, plan_prefill
from safetensors.torch import save_file


@dataclass(frozen=True, slots=True)
class LogitsPlan:
    """How to run a token list.

    Attributes:
        prefill: The first ``prefill`` ids are one prompt; single steps follow. None = all of them.
        chunk: Rows of one prefill step. None = the whole prompt at once.
        encoder_hit: Tokens whose global KV is taken from an earlier prefill, with encoder replay. Even.
        decoder_replay: Layers above the cut run only on the prompt's last window.
        images: Embeddings of the images among the ids.
    """

    prefill: int | None = None
    chunk: int | None = None
    encoder_hit: int = 0
    decoder_replay: bool = False
    images: Sequence[ImageSpan] = ()


class LogitsRun:
    """One request over pools of its own.

    Raises:
        ValueError: The plan does not fit the ids.
    """

    def __init__(
        self, backbone: Backbone, ids: IntArray, plan: LogitsPlan, *, block_tokens: int | None = None
    ) -> None:
        self.prompt = len(ids) if plan.prefill is None else plan.prefill
        _check(ids, self.prompt, plan, backbone.config.text.vocab_size)
        self.backbone, self.ids, self.plan = backbone, ids.astype(np.int64), plan
        size = block_tokens or _block_tokens(plan.encoder_hit)
        self.layout = backbone.layout(size)
        self.pages = range(-(-len(ids) // size))
        self.pools = KVPools(
            backbone.config, self.layout, num_pages=len(self.pages), num_slots=2, device=backbone.device
        )
        self._shape = backbone.batch_shape(self.layout)

    def run(self) -> torch.Tensor:
        """(T, vocabulary) float32; rows that were not run are NaN."""
        out_TV = torch.full((len(self.ids), self.backbone.config.text.vocab_size), float("nan"))
        if self.plan.encoder_hit:
            # Another request, in another slot, computes the cached prefix: only its pages are kept.
            self._prefill(self._span(self.plan.encoder_hit, 0), self.plan.encoder_hit, 1, out_TV)
            out_TV.fill_(float("nan"))
        self._prefill(self._span(self.prompt, self.plan.encoder_hit), self.prompt, 0, out_TV)
        for position in range(self.prompt, len(self.ids)):
            self.step(
                Segment(self.ids, position, 1, self.pages, 0, outputs=Outputs.ALL, images=self.plan.images),
                out_TV,
            )
        return out_TV

    def step(self, segment: Segment, out_TV: torch.Tensor) -> None:
        """Run one segment and put the logits of its output rows, which are its last ones, into ``out_TV``."""
        batch = ForwardBatch.build([segment], self._shape, self.backbone.device)
        logits_RV = self.backbone.logits(self.backbone.forward(batch, self.pools))
        end = segment.start + segment.count
        out_TV[end - len(logits_RV) : end] = logits_RV.cpu()

    def _span(self, prompt_tokens: int, hit_tokens: int) -> PrefillSpan:
        window = self.backbone.config.text.sliding_window
        span = plan_prefill(prompt_tokens=prompt_tokens, hit_tokens=hit_tokens, window=window)
        if self.plan.decoder_replay:
            return span
        return PrefillSpan(
            span.first_row, span.publish_from, span.encoder_floor, span.first_row, span.encoder_floor
        )

    def _prefill(self, span: PrefillSpan, prompt_tokens: int, slot: int, out_TV: torch.Tensor) -> None:
        size = self.plan.chunk or prompt_tokens
        for start in range(span.first_row, prompt_tokens, size):
            end = min(start + size, prompt_tokens)
            # Rows before the decoder's first one have no logits, so a chunk is cut there.
            for begin, stop in _split(start, end, span.decoder_from):
                segment = Segment(
                    self.ids,
                    begin,
                    stop - begin,
                    self.pages,
                    slot,
                    encoder_floor=span.encoder_floor,
                    decoder_from=span.decoder_from,
                    decoder_floor=span.decoder_floor,
                    publish_from=span.publish_from,
                    outputs=Outputs.ALL if begin >= span.decoder_from else Outputs.NONE,
                    images=self.plan.images,
                )
                self.step(segment, out_TV)


def _split(start: int, end: int, at: int) -> list[tuple[int, int]]:
    return [(start, at), (at, end)] if start < at < end else [(start, end)]


def _block_tokens(hit: int) -> int:
    """Largest even block size of at most 128 tokens on whose boundary the hit ends."""
    if not hit:
        return 128
    return max(size for size in range(2, 129, 2) if hit % size == 0)


def _check(ids: IntArray, prompt: int, plan: LogitsPlan, vocab_size: int) -> None:
    if ids.ndim != 1 or not len(ids):
        raise ValueError("ids must be a non-empty list")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(f"ids must lie in 0..{vocab_size - 1}, got {ids.min()}..{ids.max()}")
    if not 0 < prompt <= len(ids):
        raise ValueError(f"prefill of {prompt} in {len(ids)} ids")
    if plan.chunk is not None and plan.chunk <= 0:
        raise ValueError(f"chunk must be positive, got {plan.chunk}")
    if plan.encoder_hit % 2 or not 0 <= plan.encoder_hit < prompt:
        raise ValueError(
            f"encoder hit must be even and below the prefill of {prompt}, got {plan.encoder_hit}"
        )


def run(
    model_dir: Path, ids_file: Path, out_file: Path, *, precision: Precision, plan: LogitsPlan
) -> tuple[int, int]:
    """Read ids (a JSON list), run them, and write array ``logits`` [T, vocabulary] float32.

    Raises:
        ValueError: The file is no JSON list of integers, or the plan does not fit it.
    """
    ids = json.loads(ids_file.read_text())
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError(f"{ids_file} must hold a JSON list of token ids")
    backbone = Backbone.load(model_dir, precision=precision)
    logits_TV = LogitsRun(backbone, np.array(ids, dtype=np.int64), plan).run()
    save_file({"logits": logits_TV}, out_file)
    return len(ids), backbone.config.text.vocab_size
