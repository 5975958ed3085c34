"""A row's result depends on its request alone: not on chunking, batch mates, block size or pages. To the bit."""

import numpy as np
import pytest
import torch
from epdserve.model.batch import ForwardBatch, Outputs, Segment
from epdserve.model.logits import LogitsPlan, LogitsRun
from epdserve.model.pools import KVPools
from support.golden import tiny

SETTINGS = ["f32q", "native"]
IDS = np.random.default_rng(7).integers(3, 490, 70)  # longer than window, top-k and candidate pool


def run(setting: str, *, block_tokens: int = 16, ids: np.ndarray = IDS, **plan: object) -> torch.Tensor:
    return LogitsRun(tiny(setting), ids, LogitsPlan(**plan), block_tokens=block_tokens).run()  # type: ignore[arg-type]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("chunk", [3, 7, 33])
def test_prefill_in_chunks_is_bitwise_one_prefill(setting: str, chunk: int) -> None:
    assert same_bits(run(setting, chunk=chunk), run(setting))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("prefill", [1, 8, 33])
def test_prefill_then_decode_is_bitwise_one_prefill(setting: str, prefill: int) -> None:
    assert same_bits(run(setting, prefill=prefill, chunk=5), run(setting))


@pytest.mark.parametrize("setting", ["f32", "f32q"])
@pytest.mark.parametrize("block_tokens", [2, 128])
def test_block_size_does_not_change_a_bit(setting: str, block_tokens: int) -> None:
    assert same_bits(run(setting, block_tokens=block_tokens), run(setting))


@pytest.mark.parametrize("hit", [0, 32])
@pytest.mark.parametrize("chunk", [1, 11, 40])
def test_replay_is_bitwise_the_same_under_any_chunking(chunk: int, hit: int) -> None:
    plan = {"prefill": 63, "encoder_hit": hit, "decoder_replay": True}
    whole, chunked = run("f32q", **plan), run("f32q", chunk=chunk, **plan)
    assert same_bits(chunked, whole)
    assert whole[: 63 - 8].isnan().all()
    assert not whole[63 - 8 :].isnan().any()


@pytest.mark.parametrize("setting", SETTINGS)
def test_batch_mates_do_not_change_a_bit(setting: str) -> None:
    """Five requests of different lengths prefill in odd chunks and decode, together and alone."""
    backbone = tiny(setting)
    layout = backbone.layout(8)
    shape = backbone.batch_shape(layout)
    rng = np.random.default_rng(3)
    requests = [rng.integers(3, 490, length) for length in (3, 17, 40, 41, 66)]
    pages_of = [list(rng.permutation(np.arange(i * 12, i * 12 + 12))) for i in range(len(requests))]
    alone = [run(setting, ids=ids) for ids in requests]
    pools = KVPools(backbone.config, layout, num_pages=60, num_slots=7)
    done = [0] * len(requests)
    step = 0
    while any(d < len(ids) for d, ids in zip(done, requests, strict=True)):
        segments, owners = [], []
        for i in rng.permutation(len(requests)):
            count = min(int(rng.integers(1, 9)), len(requests[i]) - done[i])
            if count:
                segments.append(
                    Segment(requests[i], done[i], count, pages_of[i], int(i) + 1, outputs=Outputs.ALL)
                )
                owners.append(int(i))
        logits = backbone.logits(backbone.forward(ForwardBatch.build(segments, shape), pools))
        at = 0
        for owner, segment in zip(owners, segments, strict=True):
            rows = logits[at : at + segment.count]
            assert same_bits(rows, alone[owner][segment.start : segment.start + segment.count]), (owner, step)
            at += segment.count
            done[owner] += segment.count
        step += 1


def test_exactness_of_the_flags_matters() -> None:
    """Guard against a vacuous file: replay and chunk floors do change numbers when they should."""
    full, replayed = run("f32q", prefill=63), run("f32q", prefill=63, encoder_hit=32)
    assert not torch.allclose(full[62], replayed[62])
