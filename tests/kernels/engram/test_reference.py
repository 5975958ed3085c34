"""Engram rows and gate: golden vectors, published rows of the released tables, closed forms."""

import pytest
import torch
from epdserve.kernels.engram import engram_gate, ngram_rows
from epdserve.kernels.linear import linear
from support.kernel_rows import ROWS, assert_rows_independent, block, generator, randn
from torch import Tensor

EPS = 1e-20
HELLO = [15844, 1751, 14, 15844, 1751]  # compressed ids of "Hello world, hello World"
HELLO_ROWS = {  # (layer number in the golden file, position): first rows of the 2-, 3- and 4-grams
    (0, 0): (4951095, 128558709, 267666008),
    (0, 1): (5939487, 128771477, 259387328),
    (0, 4): (5939487, 142478991, 266609675),
    (1, 0): (9475024, 137477646, 260962701),
    (1, 4): (9783137, 139868819, 263210448),
}


def look_back(ids: Tensor) -> Tensor:
    """(T, 4): own id, then the three before it; -1 before the start."""
    padded = torch.cat((torch.full((3,), -1), ids.long()))
    return torch.stack([padded[3 - back : 3 - back + len(ids)] for back in range(4)], dim=1)


def rows_of(ids: Tensor, layer: int) -> Tensor:
    golden = block("engram_hash")
    return ngram_rows(
        look_back(ids),
        int(golden["pad_compressed_id"]),
        golden["multipliers"][layer],
        golden["primes"][layer].long(),
        golden["offsets"][layer].long(),
    )


@pytest.mark.parametrize("layer", [0, 1])
def test_rows_are_the_golden_ones_with_and_without_an_image(layer: int) -> None:
    golden = block("engram_hash")
    ids = golden["compressed_ids"].long()
    assert torch.equal(rows_of(ids, layer), golden["rows"][:, layer].long())
    masked = ids.masked_fill(golden["text_mask"] == 0, -1)
    assert torch.equal(rows_of(masked, layer), golden["rows_masked"][:, layer].long())


@pytest.mark.parametrize(("layer", "position"), HELLO_ROWS)
def test_rows_of_the_released_tables(layer: int, position: int) -> None:
    rows = rows_of(torch.tensor(HELLO), layer)[position].view(3, 8)
    assert tuple(rows[:, 0].tolist()) == HELLO_ROWS[layer, position]


def test_a_blocked_token_hides_everything_behind_it() -> None:
    a, b, c, e, f, g = 11, 12, 13, 14, 15, 16
    rows = rows_of(torch.tensor([a, b, -1, c, e, f, g]), 0)
    assert torch.equal(rows[3:], rows_of(torch.tensor([c, e, f, g]), 0))
    pad = int(block("engram_hash")["pad_compressed_id"])
    assert torch.equal(rows[2], rows_of(torch.tensor([pad, pad, pad, pad]), 0)[3])


def test_no_token_has_no_rows() -> None:
    assert rows_of(torch.tensor([], dtype=torch.int64), 0).shape == (0, 24)


def golden_gate_inputs() -> tuple[Tensor, ...]:
    golden = block("engram_gate")
    table = golden["table"] * golden["table_scale"]
    projected = linear(table[golden["rows"].long()].flatten(1), golden["wkv"])
    keys, value = projected[:, :128].view(-1, 4, 32), projected[:, 128:]
    return golden["stream"], keys, value, golden["q_weight"], golden["k_weight"]


def test_injection_is_the_golden_one() -> None:
    result = engram_gate(*golden_gate_inputs(), EPS)
    torch.testing.assert_close(result, block("engram_gate")["out"], atol=1e-5, rtol=0)


def test_a_blocked_row_is_unchanged_to_the_bit_and_others_do_not_notice() -> None:
    streams, *rest = golden_gate_inputs()
    blocked = torch.arange(len(streams)) % 3 == 1
    result = engram_gate(streams, *rest, EPS, blocked)
    assert torch.equal(result[blocked], streams[blocked])
    assert torch.equal(result[~blocked], engram_gate(streams, *rest, EPS)[~blocked])


def test_a_zero_stream_opens_the_gate_by_the_floor() -> None:
    value, ones = randn(1, 32), torch.ones(4, 32)
    result = engram_gate(torch.zeros(1, 4, 32), torch.ones(1, 4, 32), value, ones, ones, EPS)
    gate = torch.tensor(0.001).sigmoid()
    torch.testing.assert_close(result, (gate * value).view(1, 1, 32).expand(1, 4, 32), atol=1e-6, rtol=0)


def test_the_gate_is_the_formula_in_float64() -> None:
    streams, keys, value = randn(7, 4, 32), randn(7, 4, 32, seed=1), randn(7, 32, seed=2)
    q_weight, k_weight = randn(4, 32, seed=3), randn(4, 32, seed=4)
    x, k = streams.double(), keys.double()
    normed = x * x.square().mean(-1, keepdim=True).rsqrt() * k * k.square().mean(-1, keepdim=True).rsqrt()
    dot = (normed * (q_weight * k_weight).double()).sum(-1) * 32**-0.5
    gate = (dot.sign() * dot.abs().clamp(min=1e-6).sqrt()).sigmoid()
    expected = x + gate.unsqueeze(-1) * value.double().unsqueeze(1)
    result = engram_gate(streams, keys, value, q_weight, k_weight, EPS)
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=0)


def test_bfloat16_is_cast_once() -> None:
    inputs = [part.bfloat16() for part in golden_gate_inputs()]
    result = engram_gate(*inputs, EPS)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, engram_gate(*(part.float() for part in inputs), EPS).bfloat16())


@pytest.mark.parametrize("channels", [32, 33, 512])
def test_gate_rows_are_independent(channels: int) -> None:
    q_weight, k_weight = randn(4, channels, seed=3), randn(4, channels, seed=4)
    assert_rows_independent(
        lambda x, k, v, blocked: engram_gate(x, k, v, q_weight, k_weight, EPS, blocked),
        randn(ROWS, 4, channels),
        randn(ROWS, 4, channels, seed=1),
        randn(ROWS, channels, seed=2),
        torch.rand(ROWS, generator=generator(5)) < 0.2,
    )
