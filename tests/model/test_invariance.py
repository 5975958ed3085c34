"""A row's result depends on its request alone: not on chunking, batch mates, block size or pages. To the bit."""

from functools import cache

import numpy as np
import pytest
import torch
from epdserve.model.batch import ForwardBatch, Outputs, Segment
from epdserve.model.logits import LogitsPlan, LogitsRun
from epdserve.model.pools import KVPools
from epdserve.model.replay import Halo, PrefillSpan, plan_prefill
from epdserve.model.tail import TailLayout, read_tail, write_tail
from support.golden import tiny

SETTINGS = ["f32q", "native"]
WINDOW, BLOCK = 8, 16
LONG = np.random.default_rng(8).integers(3, 490, 152)  # longer than the halo of all layers, 84 rows
IDS = np.random.default_rng(7).integers(3, 490, 70)  # longer than window, top-k and candidate pool


@cache
def whole(setting: str) -> torch.Tensor:
    return run(setting)


def run(setting: str, *, block_tokens: int = 16, ids: np.ndarray = IDS, **plan: object) -> torch.Tensor:
    return LogitsRun(tiny(setting), ids, LogitsPlan(**plan), block_tokens=block_tokens).run()  # type: ignore[arg-type]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("chunk", [3, 7, 33])
def test_prefill_in_chunks_is_bitwise_one_prefill(setting: str, chunk: int) -> None:
    assert same_bits(run(setting, chunk=chunk), whole(setting))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("prefill", [1, 8, 33])
def test_prefill_then_decode_is_bitwise_one_prefill(setting: str, prefill: int) -> None:
    assert same_bits(run(setting, prefill=prefill, chunk=5), whole(setting))


@pytest.mark.parametrize("setting", ["f32", "f32q"])
@pytest.mark.parametrize("block_tokens", [2, 128])
def test_block_size_does_not_change_a_bit(setting: str, block_tokens: int) -> None:
    assert same_bits(run(setting, block_tokens=block_tokens), whole(setting))


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


class Rows:
    """One request's rows over pools that it may share with others: which slot, which pages, which span."""

    def __init__(self, setting: str, ids: np.ndarray, pools: KVPools, pages: list[int], slot: int) -> None:
        self.backbone, self.ids, self.pools, self.pages, self.slot = tiny(setting), ids, pools, pages, slot
        self.shape = self.backbone.batch_shape(pools.layout)

    def run(self, span: PrefillSpan, start: int, end: int, *, chunk: int = 1000) -> torch.Tensor:
        """Logits of the last row of [start, end)."""
        for begin in range(start, end, chunk):
            segment = Segment(
                self.ids,
                begin,
                min(chunk, end - begin),
                self.pages,
                self.slot,
                span.encoder_floor,
                span.decoder_from,
                span.decoder_floor,
                span.publish_from,
                Outputs.LAST if begin + chunk >= end else Outputs.NONE,
            )
            exits = self.backbone.forward(ForwardBatch.build([segment], self.shape), self.pools)
        return self.backbone.logits(exits)[0]


def pools_of(setting: str, *, pages: int = 40, slots: int = 3) -> KVPools:
    backbone = tiny(setting)
    return KVPools(backbone.config, backbone.layout(BLOCK), num_pages=pages, num_slots=slots)


def halo_of(setting: str) -> Halo:
    backbone = tiny(setting)
    return Halo.of(window=WINDOW, layers=backbone.config.text.num_hidden_layers, cut=backbone.plan.cut)


def all_rows() -> PrefillSpan:
    return PrefillSpan(0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("setting", "prompt", "hit"),
    [("f32q", 150, 0), ("f32q", 150, 64), ("native", 150, 112), ("f32q", 149, 144), ("f32q", 110, 96)],
)
def test_a_halo_gives_the_bits_of_a_prefill_that_drops_nothing(setting: str, prompt: int, hit: int) -> None:
    """Logits, window rows that later rows see, and all global KV; then decoding goes on from them."""
    cold_pools, pools = pools_of(setting), pools_of(setting)
    pages = list(range(12))
    cold = Rows(setting, LONG, cold_pools, pages, 0)
    wanted = cold.run(all_rows(), 0, prompt)
    if hit:
        Rows(setting, LONG, pools, pages, 1).run(all_rows(), 0, hit)  # another request made the blocks
    span = plan_prefill(prompt_tokens=prompt, hit_tokens=hit, window=WINDOW, halo=halo_of(setting))
    assert (span.first_row > 0) == (hit > 0)
    assert span.decoder_from > span.first_row
    warm = Rows(setting, LONG, pools, pages, 2)
    assert same_bits(warm.run(span, span.first_row, prompt, chunk=19), wanted)
    assert torch.equal(pools.pages, cold_pools.pages)
    settled = torch.arange(span.settled_from, prompt) % WINDOW
    assert torch.equal(pools.slot_windows(2)[:, settled], cold_pools.slot_windows(0)[:, settled])
    for position in range(prompt, prompt + 2):
        step = (warm.run(all_rows(), position, position + 1), cold.run(all_rows(), position, position + 1))
        assert same_bits(*step)


def test_a_shorter_halo_is_not_exact() -> None:
    """Half of it. What one missing row a layer changes is lost in the rounding of the caches here."""
    pools, pages = pools_of("f32q"), list(range(12))
    wanted = Rows("f32q", LONG, pools, pages, 0).run(all_rows(), 0, 150)
    halo = halo_of("f32q")
    short = Halo(halo.reach_tokens // 2, halo.encoder_layers, halo.decoder_layers)
    span = plan_prefill(prompt_tokens=150, hit_tokens=112, window=WINDOW, halo=short)
    assert not same_bits(Rows("f32q", LONG, pools, pages, 1).run(span, span.first_row, 150), wanted)


@pytest.mark.parametrize(  # open pairs, open blocks, block boundaries
    ("setting", "position"), [("f32q", p) for p in (1, 2, 15, 16, 17, 70)] + [("native", 101)]
)
def test_a_tail_resumes_any_token_with_the_bits_of_the_uninterrupted_run(setting: str, position: int) -> None:
    """Logits of every step after it, in another slot, over a fresh page for the open block; the same step shapes."""
    pools = pools_of(setting)
    layout = TailLayout.of(tiny(setting).config, pools.layout)
    pages = list(range(10))
    first = Rows(setting, LONG, pools, pages, 0)
    first.run(all_rows(), 0, position)
    record = torch.zeros(layout.nbytes, dtype=torch.uint8)
    tokens, open_block = LONG[:position], position // BLOCK
    page = pages[open_block] if position % BLOCK else None
    checksum = write_tail(
        record, layout, pools, slot=0, page=page, tokens=tokens, exit_D=None, identity=b"t" * 16, exact=True
    )
    again = Rows(setting, LONG, pools, pages[:open_block] + list(range(20, 30)), 2)
    pools.slot_windows(2).fill_(0x55)  # what the slot's last owner left
    read_tail(
        record,
        layout,
        pools,
        slot=2,
        page=again.pages[open_block] if position % BLOCK else None,
        tokens=tokens,
        identity=b"t" * 16,
        checksum=checksum,
        has_exit=False,
        exact=True,
    )
    span = plan_prefill(prompt_tokens=120, hit_tokens=position, window=WINDOW, has_tail=True)
    for start, end in ((position, 120), (120, 121)):
        wanted = first.run(span, start, end)
        assert same_bits(again.run(span, start, end), wanted)
    assert torch.equal(pools.pages[again.pages[:7]], pools.pages[pages[:7]])
