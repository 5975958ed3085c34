"""The model as the workers run it, on a device: goldens, batch invariance, step times of the demo shapes.

Compares the tiny model with its golden logits, counts rows whose bits change with their batch mates, and times prefill
chunks and decode steps.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import torch
from epdserve.model.backbone import Backbone
from epdserve.model.batch import ForwardBatch, Outputs, Segment
from epdserve.model.decode_graphs import DecodeGraphs
from epdserve.model.demo.writer import write_demo_model
from epdserve.model.logits import LogitsPlan, LogitsRun
from epdserve.model.pools import KVPools
from epdserve.model.precision import Precision
from epdserve.model.weights import WeightForm
from safetensors.torch import load_file

Row = tuple[str, str, str]

_TOLERANCE: Final = {Precision.F32: 1e-4, Precision.F32Q: 1e-3}  # tests/golden/README.md
_BLOCK_TOKENS: Final = 32
_REPEATS: Final = 20


def check_goldens(golden: Path, device: str) -> Iterator[Row]:
    """Largest logit difference of each prefill and of the decode steps."""
    for precision, tolerance in _TOLERANCE.items():
        arrays = load_file(golden / f"{precision.value}.safetensors")
        backbone = Backbone.load(golden, precision=precision, device=device)
        for name, plan in (("t300", LogitsPlan()), ("decode37", LogitsPlan(prefill=37))):
            ids = arrays[f"{name}.ids"].numpy().astype(np.int64)
            logits = LogitsRun(backbone, ids, plan).run()
            rows = arrays.get(f"{name}.logit_rows", torch.arange(len(ids))[36:]).long()
            difference = (logits[rows] - arrays[f"{name}.logits"]).abs().max().item()
            yield (
                f"golden {name}, {precision.value}: largest logit difference",
                f"{difference:.1e}",
                "ok" if difference <= tolerance else f"FAILED: over {tolerance:.0e}",
            )


class _Requests:
    """Random prompts over pools of their own."""

    def __init__(self, backbone: Backbone, count: int, tokens: int) -> None:
        self.backbone, self.count = backbone, count
        layout = backbone.layout(_BLOCK_TOKENS)
        self.shape = backbone.batch_shape(layout)
        pages = -(-tokens // _BLOCK_TOKENS)
        self.pools = KVPools(
            backbone.config, layout, num_pages=pages * count, num_slots=count, device=backbone.device
        )
        rng = np.random.default_rng(0)
        self.ids = rng.integers(3, backbone.config.text.vocab_size, (count, tokens))
        self.pages = np.arange(pages * count).reshape(count, pages).tolist()

    def segments(self, start: int, rows: int, members: range) -> list[Segment]:
        return [Segment(self.ids[i], start, rows, self.pages[i], i, outputs=Outputs.LAST) for i in members]

    def forward(self, start: int, rows: int, members: range) -> torch.Tensor:
        batch = ForwardBatch.build(self.segments(start, rows, members), self.shape, self.backbone.device)
        return self.backbone.logits(self.backbone.forward(batch, self.pools))


def check_batch_invariance(backbone: Backbone) -> Row:
    """Rows of a batch of 16 that differ in a bit from the same row alone."""
    together, alone = _Requests(backbone, 16, 96), _Requests(backbone, 16, 96)
    for start in (0, 32, 64):
        logits = together.forward(start, 32, range(16))
        single = torch.cat([alone.forward(start, 32, range(i, i + 1)) for i in range(16)])
    changed = int((logits != single).any(dim=1).sum())
    return (
        "rows of 16 whose bits depend on batch mates",
        str(changed),
        "ok" if not changed else "not invariant here",
    )


def time_steps(backbone: Backbone) -> Iterator[Row]:
    """Median milliseconds of prefill chunks and of decode steps."""
    for rows in (256, 1024):
        requests = _Requests(backbone, 1, 2048)
        seconds = _median_s(backbone, lambda r=requests, n=rows: r.forward(0, n, range(1)))  # type: ignore[misc]
        yield f"prefill chunk of {rows} rows", f"{1e3 * seconds:.1f} ms", f"{rows / seconds:,.0f} tokens/s"
    for batch in (1, 8, 64):
        requests = _Requests(backbone, batch, 512)
        requests.forward(0, 256, range(batch))
        seconds = _median_s(backbone, lambda r=requests, n=batch: r.forward(256, 1, range(n)))  # type: ignore[misc]
        yield f"decode step of {batch} rows", f"{1e3 * seconds:.1f} ms", f"{batch / seconds:,.0f} tokens/s"


def _median_s(backbone: Backbone, step: Callable[[], torch.Tensor]) -> float:
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        step()
        if backbone.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def check_packed(golden: Path, device: str) -> Iterator[Row]:
    """The packed way on the tiny model: golden figures of ``native``, batch invariance, and graphs on and off."""
    backbone = Backbone.load(golden, precision=Precision.NATIVE, device=device, form=WeightForm.STORED)
    arrays = load_file(golden / "native.safetensors")
    logits = LogitsRun(backbone, arrays["t37.ids"].numpy().astype(np.int64), LogitsPlan()).run()
    expected = arrays["t37.logits"]
    cosine = float(torch.nn.functional.cosine_similarity(logits, expected, dim=1).min())
    same = float((logits.argmax(1) == expected.argmax(1)).float().mean())
    right = cosine > 0.95 and same >= 0.7  # tests/golden/README.md
    figures = f"{cosine:.3f}, {same:.2f}"
    yield "packed, golden t37: least cosine of a row, best tokens", figures, "ok" if right else "FAILED"
    yield check_batch_invariance(backbone)
    yield from _graphs(backbone)


def _graphs(backbone: Backbone) -> Iterator[Row]:
    """Bits and times of decode steps as captured graphs and as they are launched one by one."""
    for batch in (1, 8, 32):
        plain, captured = (_Requests(backbone, batch, 512) for _ in range(2))
        for requests in (plain, captured):
            requests.forward(0, 200, range(batch))
        graphs = DecodeGraphs.of(backbone, captured.pools, most_rows=batch)
        if graphs is None:
            yield f"packed, decode step of {batch} rows as a graph", "", "no graphs here"
            return

        def replayed(
            start: int, graphs: DecodeGraphs = graphs, of: _Requests = captured, n: int = batch
        ) -> torch.Tensor:
            exit_RD = graphs.forward(of.segments(start, 1, range(n)))
            assert exit_RD is not None
            return backbone.logits(exit_RD)

        other = sum(
            int((replayed(at) != plain.forward(at, 1, range(batch))).any(dim=1).sum())
            for at in (200, 201, 202)
        )
        yield f"packed, {batch} rows: other bits as a graph", str(other), "FAILED" if other else "ok"
        slow = _median_s(backbone, lambda r=plain, n=batch: r.forward(203, 1, range(n)))  # type: ignore[misc]
        fast = _median_s(backbone, lambda run=replayed: run(203))  # type: ignore[misc]
        times = f"{1e3 * slow:.2f} ms, {1e3 * fast:.2f} ms"
        yield f"packed, decode step of {batch} rows, tiny model: plain, graph", times, f"{slow / fast:.1f}x"


def check_model(golden: Path, device: str) -> Iterator[Row]:
    """Goldens of the tiny model, batch invariance and step times of the demo model."""
    yield from check_packed(golden, device)
    yield from check_goldens(golden, device)
    with tempfile.TemporaryDirectory() as directory:
        write_demo_model(Path(directory) / "demo")
        backbone = Backbone.load(Path(directory) / "demo", precision=Precision.F32Q, device=device)
        yield check_batch_invariance(backbone)
        yield from time_steps(backbone)
