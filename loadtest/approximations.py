"""``python -m epdserve.loadtest.approximations``: what each approximation does to logits, against the exact forward.

The exact forward runs every row in every layer over caches that are not rounded, in float32. Each way changes one
thing, or all: replays through the code that serves, roundings through the codecs of the caches. Compared are the rows
after a hit of so many tokens, up to a window of them, and the steps decoded after the prompt; the tokens are given, so
that one wrong choice does not count again. Error: root mean square of the logits' difference over the exact logits'
spread (standard deviation over the vocabulary).
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import torch
import typer
from epdserve.kernels.quant import round_fp4_e4m3, round_fp4_e8m0, round_fp8
from epdserve.loadtest.approximations_plot import markdown, svg
from epdserve.model.backbone import Backbone
from epdserve.model.batch import ForwardBatch
from epdserve.model.demo.corpus import lines
from epdserve.model.demo.writer import write_demo_model, write_trained_model
from epdserve.model.entry_codec import Float32Codec
from epdserve.model.layers.wide_caches import WideCaches
from epdserve.model.logits import LogitsPlan, LogitsRun
from epdserve.model.pools import KVPools
from epdserve.model.precision import Precision
from epdserve.model.tokenizer import Tokenizer

DECODED: Final = 8


@dataclass(frozen=True, slots=True)
class Way:
    """What is approximated."""

    name: str
    encoder_replay: bool = False
    decoder_replay: bool = False
    fp4_main: bool = False
    fp4_index: bool = False
    fp8_window: bool = False


WAYS: Final = (
    Way("encoder replay", encoder_replay=True),
    Way("decoder replay", decoder_replay=True),
    Way("both replays", encoder_replay=True, decoder_replay=True),
    Way("FP4 main KV", fp4_main=True),
    Way("FP4 index keys", fp4_index=True),
    Way("FP8 window", fp8_window=True),
    Way("all caches rounded", fp4_main=True, fp4_index=True, fp8_window=True),
    Way("all of it", True, True, True, True, True),
)


@dataclass(frozen=True, slots=True)
class Price:
    """Of one way at one hit length.

    Attributes:
        error: Root mean square of the logits' error over their spread, all rows.
        agreement: Share of rows whose best token is the exact one.
        rows: How many.
    """

    weights: str
    way: str
    hit: int
    error: float
    agreement: float
    rows: int


class _RoundingCodec(Float32Codec):
    """Entries stored in float32 after the roundings of a way."""

    def __init__(self, way: Way) -> None:
        self._way = way

    # Methods: see EntryCodec.

    def encode_window(self, kv_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().encode_window(round_fp8(kv_ND.float()) if self._way.fp8_window else kv_ND)

    def encode_main(self, latent_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().encode_main(round_fp4_e4m3(latent_ND.float()) if self._way.fp4_main else latent_ND)

    def encode_index(self, key_NI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().encode_main(round_fp4_e8m0(key_NI.float()) if self._way.fp4_index else key_NI)

    def round_index_query(self, q: torch.Tensor) -> torch.Tensor:
        return round_fp4_e8m0(q.float()) if self._way.fp4_index else q.float()


class RoundingBackbone(Backbone):
    """An exact backbone whose caches round as a way says; shares the weights of the one it is made of."""

    def __init__(self, exact: Backbone, way: Way) -> None:
        self.__dict__.update(exact.__dict__)
        self._codec = _RoundingCodec(way)

    def caches(self, batch: ForwardBatch, pools: KVPools) -> WideCaches:
        """Those of the way."""
        return WideCaches(self.config, batch, pools, self._codec)


def prices(
    backbone: Backbone,
    texts: Sequence[np.ndarray],
    hits: Sequence[int],
    *,
    weights: str,
    decoded: int = DECODED,
) -> Iterator[Price]:
    """Every way at every hit length; a text holds the longest hit, a window and ``decoded`` tokens.

    Hits are multiples of 32, the block's length here.
    """
    window = backbone.config.text.sliding_window
    for hit in hits:
        ids = [text[: hit + window + decoded] for text in texts]
        exact = [LogitsRun(backbone, each, LogitsPlan(), block_tokens=32).run()[hit:] for each in ids]
        for way in WAYS:
            plan = LogitsPlan(
                prefill=hit + window,
                encoder_hit=hit if way.encoder_replay else 0,
                decoder_replay=way.decoder_replay,
            )
            rounding = RoundingBackbone(backbone, way)
            ours = [LogitsRun(rounding, each, plan, block_tokens=32).run()[hit:] for each in ids]
            yield _price(torch.cat(ours), torch.cat(exact), weights=weights, way=way.name, hit=hit)


def _price(ours_RV: torch.Tensor, exact_RV: torch.Tensor, *, weights: str, way: str, hit: int) -> Price:
    wrong = (ours_RV - exact_RV).square().mean(dim=1) / exact_RV.var(dim=1)
    same = ours_RV.argmax(dim=1) == exact_RV.argmax(dim=1)
    return Price(weights, way, hit, float(wrong.mean().sqrt()), float(same.float().mean()), int(same.numel()))


def texts_of(directory: Path, *, count: int, tokens: int, seed: int) -> list[np.ndarray]:
    """Texts of the demo model's own kind, cut to length."""
    tokenizer = Tokenizer.from_directory(directory)
    texts = []
    for number in range(count):
        ids: list[int] = []
        for line in lines(seed + number, 1000):
            ids += tokenizer.encode(line + "\n")
            if len(ids) >= tokens:
                break
        texts.append(np.array(ids[:tokens], dtype=np.int64))
    return texts


def measure(*, count: int, hits: Sequence[int], seed: int) -> list[Price]:
    """Random and trained weights of the demo model over the same texts."""
    found: list[Price] = []
    for weights, write in (("random", write_demo_model), ("trained", write_trained_model)):
        with tempfile.TemporaryDirectory() as folder:
            directory = write(Path(folder) / "model")
            backbone = Backbone.load(directory, precision=Precision.F32)
            longest = max(hits) + backbone.config.text.sliding_window + DECODED
            texts = texts_of(directory, count=count, tokens=longest, seed=seed)
            found += prices(backbone, texts, hits, weights=weights)
    return found


def main(
    texts: Annotated[int, typer.Option(min=1, help="Texts of each kind of weights.")] = 6,
    hits: Annotated[str, typer.Option(help="Hit lengths, multiples of 32.")] = "64,128,256,512,1024",
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 7,
    plot: Annotated[Path | None, typer.Option(help="Write an SVG plot here.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Prices of the approximations as a table, and as a plot."""
    torch.set_num_threads(1)
    found = [
        asdict(price) for price in measure(count=texts, hits=[int(hit) for hit in hits.split(",")], seed=seed)
    ]
    print(markdown(found))
    if plot is not None:
        plot.write_text(svg(found))
    if as_json is not None:
        as_json.write_text(json.dumps(found))


if __name__ == "__main__":
    typer.run(main)
