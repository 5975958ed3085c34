"""Sparse attention over packed entries in Triton's interpreter; splits are shrunk to a few keys."""

import pytest
import torch
from epdserve.kernels.attention import sparse
from epdserve.kernels.attention.entries import Selected, Window
from epdserve.kernels.attention.reference import sink_attention_ref
from epdserve.kernels.attention.sparse import sparse_attention
from epdserve.kernels.launch import LaunchRefusedError
from epdserve.kernels.rope.reference import apply_rope_inverse_ref
from support.kernel_rows import generator, randn
from support.packed_pages import Pool, packed_pool, packed_windows
from support.triton_rows import assert_same_bits
from torch import Tensor

HEADS, DIM, PAIRS, KEYS = 16, 64, 8, 8


@pytest.fixture(autouse=True)
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "SPLIT_KEYS", KEYS)
    monkeypatch.setattr(sparse, "MERGED_HEADS", 4)


class Case:
    """Rows over a window pool and two segments of entries, some missing."""

    def __init__(self, rows: int, window: int, chosen: int, entries: int = 30) -> None:
        self.q = randn(rows, HEADS, DIM, seed=5).bfloat16()
        self.bytes, self.values = packed_windows(40, DIM, seed=6)
        draw = generator(7)
        self.index = torch.randint(-1, 40, (rows, window), generator=draw)
        self.pool = packed_pool("main", 2, entries, DIM, seed=8)
        self.segment = torch.arange(rows) % 2
        self.chosen = torch.randint(-1, entries, (rows, chosen), generator=draw)
        self.sink = randn(HEADS, seed=9)
        angle = randn(rows, PAIRS, seed=10)
        self.cos, self.sin = angle.cos(), angle.sin()

    def selected(self, rows: Tensor) -> Selected:
        pool: Pool = self.pool
        offsets = pool.values_offset, pool.scales_offset, pool.entries_per_page
        return Selected(pool.pages_PB, pool.table_SP, self.segment[rows], self.chosen[rows], *offsets)

    def run(self, rows: Tensor | None = None, *, one: bool = False, compressed: bool = True) -> Tensor:
        rows = torch.arange(len(self.q)) if rows is None else rows
        return sparse_attention(
            self.q[rows], Window(self.bytes, self.index[rows]), self.selected(rows) if compressed else None,
            self.sink, self.cos[rows], self.sin[rows], one_program_a_row=one,
        )  # fmt: skip

    def expected(self, *, compressed: bool = True) -> Tensor:
        kv, valid = self.values[self.index.clamp(min=0)], self.index >= 0
        if compressed:
            main = self.pool.values_SED[self.segment[:, None], self.chosen.clamp(min=0)]
            kv, valid = torch.cat([kv, main], dim=1), torch.cat([valid, self.chosen >= 0], dim=1)
        if not kv.shape[1]:
            return torch.zeros(self.q.shape)
        return sink_attention_ref(self.q, kv, valid, self.sink, DIM**-0.5)


def assert_near(got: Tensor, case: Case, exact: Tensor) -> None:
    """Weights are rounded to bfloat16 (2**-9 of each), the quotient and the rotated result once each (2**-9)."""
    largest = torch.cat([case.values, case.pool.values_SED.flatten(0, 1)]).abs().max()
    rotated = apply_rope_inverse_ref(exact, case.cos, case.sin)
    torch.testing.assert_close(got.float(), rotated, rtol=0.0, atol=float(largest) * 4 * 2.0**-9)
    assert float((got.float() - rotated).abs().mean()) < 2e-3


@pytest.mark.parametrize("one", [False, True], ids=["splits", "row"])
@pytest.mark.parametrize(("window", "chosen"), [(KEYS, KEYS), (KEYS - 1, KEYS + 1), (KEYS + 1, 1)])
def test_rows_equal_the_reference(window: int, chosen: int, one: bool) -> None:
    case = Case(2, window, chosen)
    assert_near(case.run(one=one), case, case.expected())


@pytest.mark.parametrize("one", [False, True], ids=["splits", "row"])
def test_layers_without_compressed_entries_and_rows_without_any(one: bool) -> None:
    case = Case(2, KEYS + 1, 0)
    case.index[1] = -1
    assert_near(case.run(one=one, compressed=False), case, case.expected(compressed=False))
    assert_near(case.run(one=one), case, case.expected())
    assert not bool(case.run(one=one)[1].any())
    assert Case(0, 3, 3).run(one=one).shape == (0, HEADS, DIM)


def test_both_kernels_give_the_same_bits() -> None:
    case = Case(2, KEYS + 1, KEYS + 5)
    assert_same_bits(case.run(one=True), case.run(one=False))


@pytest.mark.parametrize("one", [False, True], ids=["splits", "row"])
def test_a_row_depends_on_itself_alone(one: bool) -> None:
    case = Case(3, KEYS, KEYS)
    whole = case.run(one=one)
    for rows in ([2], [1, 0]):
        assert_same_bits(case.run(torch.tensor(rows), one=one), whole[rows])


def test_missing_entries_contribute_nothing_whatever_lies_there() -> None:
    case = Case(2, KEYS, KEYS)
    before = case.run()
    unused = sorted(set(range(len(case.pool.pages_PB))) - set(case.pool.table_SP.flatten().tolist()))
    case.pool.pages_PB[unused] = 0xFF
    case.bytes[sorted(set(range(40)) - set(case.index.flatten().tolist()))] = 0xFF
    assert_same_bits(case.run(), before)


def test_a_large_sink_takes_everything_and_a_small_one_nothing() -> None:
    case = Case(2, KEYS, KEYS)
    case.sink = torch.full((HEADS,), 1e4)
    assert float(case.run().float().abs().max()) < 1e-6
    case.sink = torch.full((HEADS,), -1e30)
    assert_near(case.run(), case, case.expected())


def test_bad_arguments_are_refused_with_their_value() -> None:
    case = Case(2, KEYS, KEYS)
    case.index[0, 0] = 40
    with pytest.raises(LaunchRefusedError, match="index_TW holds 40, of 40"):
        case.run()
    case = Case(2, KEYS, KEYS)
    case.chosen[0, 0] = 32
    with pytest.raises(LaunchRefusedError, match="entries_TK holds 32, of 32"):
        case.run()
    case = Case(2, KEYS, KEYS)
    case.q = case.q.float()
    with pytest.raises(LaunchRefusedError, match=r"q_THD must be bfloat16, got torch\.float32"):
        case.run()
    case = Case(2, KEYS, KEYS)
    case.bytes = case.bytes[:, :-1].contiguous()
    with pytest.raises(LaunchRefusedError, match=r"rows_NB must have the shape \(None, 66\), got \(40, 65\)"):
        case.run()
    case = Case(2, KEYS, KEYS)
    case.sink = case.sink[:3]
    with pytest.raises(LaunchRefusedError, match=r"sink_H must have the shape \(16,\), got \(3,\)"):
        case.run()
