"""The packed way: weights and caches as they are stored. Here by the references, with the bits of the wide way.

That launchers take what it hands them, and agree with those references, is shown in tests/kernels/test_packed_way.py.
"""

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from epdserve import kernels, model
from epdserve.kernels.quant import dequantize_mxfp4
from epdserve.model.backbone import Backbone
from epdserve.model.batch import ForwardBatch, Outputs, Segment
from epdserve.model.config import ModelConfig
from epdserve.model.demo.preset import CONFIG
from epdserve.model.errors import WeightFileError
from epdserve.model.layers import packed_caches
from epdserve.model.layers.packed import PackedArithmetic
from epdserve.model.layers.wide import WideArithmetic
from epdserve.model.logits import LogitsPlan, LogitsRun
from epdserve.model.pools import KVPools
from epdserve.model.precision import Precision
from epdserve.model.ways import arithmetic_of, weight_form
from epdserve.model.weights import WeightForm, load_weights
from support.golden import TINY, golden, ids_of, tiny
from support.released_config import released_document
from torch.utils._python_dispatch import TorchDispatchMode

IDS = np.random.default_rng(7).integers(3, 490, 70)  # longer than window, top-k and candidate pool
CUDA = torch.device("cuda")


@cache
def packed() -> Backbone:
    return Backbone.load(TINY, precision=Precision.NATIVE, form=WeightForm.STORED)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def runs(ids: np.ndarray, plan: LogitsPlan) -> Iterator[tuple[LogitsRun, torch.Tensor]]:
    for backbone in (packed(), tiny("native")):
        run = LogitsRun(backbone, ids, plan, block_tokens=16)
        yield run, run.run()


@pytest.mark.parametrize(
    "plan",
    [
        LogitsPlan(),
        LogitsPlan(
            prefill=57, chunk=7
        ),  # then 13 decode steps; ratio 2 opens pairs in one step and closes in the next
        LogitsPlan(prefill=60, encoder_hit=32),
        LogitsPlan(prefill=63, decoder_replay=True, chunk=20),
        LogitsPlan(prefill=63, encoder_hit=32, decoder_replay=True),
    ],
    ids=["prefill", "decode", "encoder replay", "decoder replay", "both"],
)
def test_logits_pages_and_windows_have_the_bits_of_the_wide_way(plan: LogitsPlan) -> None:
    (ours, logits), (wide, expected) = runs(IDS, plan)
    assert same_bits(logits, expected)
    assert torch.equal(ours.pools.pages, wide.pools.pages)
    assert torch.equal(ours.pools.slot_windows(0), wide.pools.slot_windows(0))
    assert torch.equal(ours.pools.slot_pairs(0), wide.pools.slot_pairs(0))


def test_goldens_point_the_same_way() -> None:
    arrays = golden("native")
    logits = LogitsRun(packed(), ids_of(arrays, "t37.ids"), LogitsPlan()).run()
    expected = arrays["t37.logits"]
    assert torch.nn.functional.cosine_similarity(logits, expected, dim=1).min() > 0.95
    assert (logits.argmax(1) == expected.argmax(1)).float().mean() >= 0.7


def steps(backbone: Backbone, seed: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Three requests in odd chunks, together: request, first row, logits of its rows."""
    layout = backbone.layout(8)
    shape, rng = backbone.batch_shape(layout), np.random.default_rng(seed)
    requests = [rng.integers(3, 490, length) for length in (5, 26, 47)]
    pages = [list(rng.permutation(np.arange(i * 12, i * 12 + 12))) for i in range(3)]
    pools = KVPools(backbone.config, layout, num_pages=36, num_slots=4)
    done = [0, 0, 0]
    while any(d < len(ids) for d, ids in zip(done, requests, strict=True)):
        members = [int(i) for i in rng.permutation(3) if done[i] < len(requests[i])]
        segments = [
            Segment(
                requests[i],
                done[i],
                min(int(rng.integers(1, 9)), len(requests[i]) - done[i]),
                pages[i],
                i + 1,
                outputs=Outputs.ALL,
            )
            for i in members
        ]
        logits = backbone.logits(backbone.forward(ForwardBatch.build(segments, shape), pools))
        for i, segment, rows in zip(
            members, segments, logits.split([s.count for s in segments]), strict=True
        ):
            yield i, segment.start, rows
            done[i] += segment.count


def test_batches_have_the_bits_of_the_wide_way_and_of_each_request_alone() -> None:
    rng = np.random.default_rng(3)  # the requests of ``steps``
    requests = [rng.integers(3, 490, length) for length in (5, 26, 47)]
    alone = [LogitsRun(packed(), ids, LogitsPlan(), block_tokens=8).run() for ids in requests]
    for ours, wide in zip(steps(packed(), 3), steps(tiny("native"), 3), strict=True):
        assert ours[:2] == wide[:2]
        assert same_bits(ours[2], wide[2])
        assert same_bits(ours[2], alone[ours[0]][ours[1] : ours[1] + len(ours[2])])


def test_a_chunk_whose_scores_are_too_large_is_chosen_for_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = LogitsRun(packed(), IDS, LogitsPlan(), block_tokens=16).run()
    monkeypatch.setattr(packed_caches, "ROWS_PER_TILE", 9)
    monkeypatch.setattr(packed_caches, "SCORE_BYTES", 1)
    assert same_bits(LogitsRun(packed(), IDS, LogitsPlan(), block_tokens=16).run(), expected)


def test_parts_of_rows_count_the_rows_of_each_segment() -> None:
    parts = list(packed_caches._row_parts((3, 0, 4), 5))
    assert parts == [(slice(0, 5), [3, 0, 2]), (slice(5, 7), [0, 0, 2])]


class Refusing(TorchDispatchMode):
    """Refuses what waits for a device, unless a kernel's reference or a check on the host does it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        waits = name.partition(".")[0] in {
            "item",
            "_local_scalar_dense",
            "nonzero",
            "masked_select",
            "equal",
            "is_nonzero",
        }
        if name == "index.Tensor":
            waits = any(index is not None and index.dtype is torch.bool for index in args[1])
        if waits and not _inside_kernels():
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


def _inside_kernels() -> bool:
    root, frame = str(Path(kernels.__path__[0]).resolve()), sys._getframe(1)
    while frame is not None:
        if str(Path(frame.f_code.co_filename).resolve()).startswith(root):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def one_step(backbone: Backbone, count: int) -> None:
    layout = backbone.layout(16)
    pools = KVPools(backbone.config, layout, num_pages=8, num_slots=2)
    segments = [Segment(IDS, 40, count, [0, 1, 2, 3], 0), Segment(IDS, 33, count, [4, 5, 6, 7], 1)]
    batch = ForwardBatch.build(segments, backbone.batch_shape(layout))
    with Refusing():
        backbone.logits(backbone.forward(batch, pools))


@pytest.mark.parametrize("count", [1, 9])
def test_a_forward_waits_for_nothing(count: int) -> None:
    one_step(packed(), count)


def test_the_wide_way_waits_once_a_layer() -> None:
    """What the test above would notice."""
    with pytest.raises(AssertionError, match="item waits"):
        one_step(tiny("native"), 1)


WAITS = re.compile(r"\.(item|tolist|cpu|numpy|nonzero)\(|torch\.cuda\.synchronize")


def test_no_launcher_and_no_layer_of_the_packed_way_asks_for_a_value() -> None:
    """By their source; ``launch.check_indices`` looks at values on the host, or with a debug switch."""
    files = [
        file
        for file in Path(kernels.__path__[0]).glob("*/*.py")
        if file.name not in {"reference.py", "tables.py"}
        and file.parent.name not in {"aot", "checksum", "host", "vision", "sampling"}
    ]
    layers = Path(model.__path__[0]) / "layers"
    files += [file for file in layers.glob("*.py") if not file.name.startswith("wide")]
    assert len(files) > 30
    found = {file.name: WAITS.findall(file.read_text()) for file in files}
    assert not {name: waits for name, waits in found.items() if waits}


def test_stored_weights_are_the_bytes_of_the_files() -> None:
    config = ModelConfig.from_directory(TINY)
    stored, wide = (load_weights(TINY, config, form=form) for form in (WeightForm.STORED, WeightForm.WIDE))
    assert stored.fingerprint == wide.fingerprint
    sizes = [sum(t.numel() * t.element_size() for t in w.tensors.values()) for w in (stored, wide)]
    assert sizes[0] < 0.45 * sizes[1]  # norms and embeddings are large in a tiny model
    experts = stored.tensors["layers.3.ffn.experts.w13"], stored.tensors["layers.3.ffn.experts.w13_scale"]
    assert [part.shape for part in experts] == [(8, 128, 64), (8, 128, 4)]
    values = dequantize_mxfp4(*experts)
    assert torch.equal(values[:, :64], wide.tensors["layers.3.ffn.experts.w1"])
    assert torch.equal(values[:, 64:], wide.tensors["layers.3.ffn.experts.w3"])


def test_a_device_and_native_precision_get_the_packed_way_if_kernels_take_the_shapes() -> None:
    released, demo = ModelConfig.model_validate(released_document()), ModelConfig.model_validate(CONFIG)
    assert weight_form(released, Precision.NATIVE, CUDA) is WeightForm.STORED
    assert weight_form(released, Precision.NATIVE, torch.device("cpu")) is WeightForm.WIDE
    assert weight_form(released, Precision.BF16Q, CUDA) is WeightForm.WIDE
    assert weight_form(demo, Precision.NATIVE, CUDA) is WeightForm.WIDE
    assert isinstance(packed()._math, PackedArithmetic)
    assert isinstance(tiny("native")._math, WideArithmetic)


def test_stored_weights_want_native_precision() -> None:
    config = ModelConfig.from_directory(TINY)
    with pytest.raises(ValueError, match="native, not bf16q"):
        arithmetic_of(config, {}, WeightForm.STORED, Precision.BF16Q)


def test_a_plain_weight_that_bfloat16_does_not_hold_is_refused() -> None:
    math = PackedArithmetic(ModelConfig.from_directory(TINY), {"a.weight": torch.tensor([[1.0 + 2.0**-12]])})
    with pytest.raises(WeightFileError, match=r"a\.weight: bfloat16"):
        math.projection("a.weight", quantized=False)
