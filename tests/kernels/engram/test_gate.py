"""The Engram gate in Triton's interpreter."""

import pytest
import torch
from epdserve.kernels.engram.gate import engram_gate
from epdserve.kernels.engram.reference import engram_gate_ref
from epdserve.kernels.launch import LaunchRefusedError
from support.kernel_rows import randn
from support.triton_rows import assert_row_bits, assert_same_bits

EPS = 1e-20


def arguments(tokens: int, channels: int, copies: int = 4) -> tuple[torch.Tensor, ...]:
    both = randn(tokens, copies + 1, channels, seed=1)  # keys and the shared value lie side by side
    return (
        randn(tokens, copies, channels),
        both[:, :copies],
        both[:, copies],
        randn(copies, channels, seed=2),
        randn(copies, channels, seed=3),
    )


@pytest.mark.parametrize("channels", [1, 32, 96, 520])
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_streams_are_those_of_the_reference(tokens: int, channels: int) -> None:
    given = arguments(tokens, channels)
    # three sums of D terms differ by at most D ulp of their absolute sum between orders, and the gate's slope is 1/4
    got, expected = engram_gate(*given, EPS), engram_gate_ref(*given, EPS)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-7 * (channels + 8) * 4)


def test_blocked_rows_come_back_to_the_bit() -> None:
    given = arguments(4, 64)
    given[0][1, 0, 0] = float("nan")
    blocked = torch.tensor([False, True, False, True])
    got = engram_gate(*given, EPS, blocked)
    assert_same_bits(got[blocked], given[0][blocked])
    assert_same_bits(got[~blocked], engram_gate(*given, EPS)[~blocked])


def test_a_zero_stream_opens_the_gate_a_little_more_than_half() -> None:
    streams, keys, value, q, k = arguments(1, 32)
    got = engram_gate(torch.zeros_like(streams), keys, value, q, k, EPS)
    torch.testing.assert_close(got, torch.sigmoid(torch.tensor(1e-3)) * value.unsqueeze(1).expand(1, 4, 32))


def test_bfloat16_is_cast_once() -> None:
    given = tuple(x.bfloat16() for x in arguments(3, 64))
    got, expected = engram_gate(*given, EPS), engram_gate_ref(*given, EPS)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected.float(), rtol=8e-3, atol=1e-6)


def test_a_row_depends_on_itself_alone() -> None:
    streams, keys, value, q, k = arguments(6, 64)
    assert_row_bits(lambda s, x, v: engram_gate(s, x, v, q, k, EPS), streams, keys, value)


def test_bad_arguments_are_refused_with_their_value() -> None:
    streams, keys, value, q, k = arguments(2, 32)
    with pytest.raises(LaunchRefusedError, match=r"got \(2, 16\)"):
        engram_gate(streams, keys, value[:, :16], q, k, EPS)
    with pytest.raises(LaunchRefusedError, match="side by side, got strides"):
        engram_gate(streams.transpose(0, 1).contiguous().transpose(0, 1), keys, value, q, k, EPS)
    with pytest.raises(LaunchRefusedError, match=r"got torch\.uint8"):
        engram_gate(streams, keys, value, q, k, EPS, torch.zeros(2, dtype=torch.uint8))
