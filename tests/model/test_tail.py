"""The tail record resumes a request to the bit, in other pages and another slot, and refuses anything else."""

import numpy as np
import pytest
import torch
from epdserve.model.batch import ForwardBatch, Outputs, Segment
from epdserve.model.errors import TailError
from epdserve.model.logits import LogitsPlan, LogitsRun
from epdserve.model.pools import KVPools, aligned_bytes
from epdserve.model.tail import TailLayout, read_tail, write_tail
from support.golden import tiny

IDS = np.random.default_rng(1).integers(3, 490, 60)
IDENTITY = bytes(range(16))


def record_after(setting: str, tokens: int) -> tuple[LogitsRun, TailLayout, torch.Tensor, int]:
    run = LogitsRun(tiny(setting), IDS[:tokens], LogitsPlan(), block_tokens=16)
    run.run()
    layout = TailLayout.of(run.backbone.config, run.layout)
    record = aligned_bytes((layout.nbytes,))
    page = tokens // 16 if tokens % 16 else None
    exit_D = torch.arange(128, dtype=torch.float32)
    checksum = write_tail(
        record,
        layout,
        run.pools,
        slot=0,
        page=page,
        tokens=run.ids,
        exit_D=exit_D,
        identity=IDENTITY,
        exact=True,
    )
    return run, layout, record, checksum


@pytest.mark.parametrize(
    ("setting", "tokens"), [("f32q", tokens) for tokens in (1, 2, 15, 16, 17, 31, 33)] + [("f32", 17)]
)
def test_a_request_goes_on_elsewhere_to_the_bit(setting: str, tokens: int) -> None:
    ids = IDS[: tokens + 18]  # more than a block further
    expected = LogitsRun(tiny(setting), ids, LogitsPlan(prefill=tokens), block_tokens=16).run()
    run, layout, record, checksum = record_after(setting, tokens)
    pools = KVPools(run.backbone.config, run.layout, num_pages=9, num_slots=3)
    pages = [7, 2, 5, 0]
    for index in range(tokens // 16):
        pools.pages[pages[index]] = run.pools.pages[index]
    page = pages[tokens // 16] if tokens % 16 else None
    exit_D = read_tail(
        record,
        layout,
        pools,
        slot=2,
        page=page,
        tokens=run.ids,
        identity=IDENTITY,
        checksum=checksum,
        has_exit=True,
        exact=True,
    )
    assert exit_D is not None
    assert torch.equal(exit_D, torch.arange(128, dtype=torch.float32))
    shape = run.backbone.batch_shape(run.layout)
    for position in range(tokens, len(ids)):
        segment = Segment(ids, position, 1, pages, 2, outputs=Outputs.LAST)
        exits = run.backbone.forward(ForwardBatch.build([segment], shape), pools)
        assert torch.equal(run.backbone.logits(exits)[0], expected[position])


def test_anything_unexpected_is_refused_and_nothing_written() -> None:
    run, layout, record, checksum = record_after("f32q", 19)
    pools = KVPools(run.backbone.config, run.layout, num_pages=2, num_slots=1)

    def read(record: torch.Tensor = record, **changes: object) -> None:
        arguments = {
            "slot": 0,
            "page": 1,
            "tokens": run.ids,
            "identity": IDENTITY,
            "checksum": checksum,
            "has_exit": True,
            "exact": True,
        } | changes
        read_tail(record, layout, pools, **arguments)  # type: ignore[arg-type]

    for position in (
        0,
        layout.windows_bytes - 1,
        layout.payload_bytes - 1,
        *range(layout.payload_bytes, layout.payload_bytes + 64),
    ):
        torn = record.clone()
        torn[position] ^= 4
        with pytest.raises(TailError):
            read(torn)
    with pytest.raises(TailError):
        read(identity=bytes(16))
    with pytest.raises(TailError):
        read(checksum=checksum ^ 1)
    with pytest.raises(TailError):
        read(tokens=run.ids[:-1])
    other = run.ids.copy()
    other[-1] += 1
    with pytest.raises(TailError, match="other tokens"):
        read(tokens=other)
    assert not pools.pages.any()
    assert not pools.slot_windows(0).any()
