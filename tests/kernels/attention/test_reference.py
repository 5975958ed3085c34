import pytest
import torch
from epdserve.kernels.attention import sink_attention
from support.kernel_rows import assert_rows_independent, block, generator, randn


def test_it_is_the_golden_attention() -> None:
    golden = block("sparse_attention")
    index = golden["index"].long()
    entries = golden["kv"][index.clamp(min=0)]
    out = sink_attention(golden["q"], entries, index >= 0, golden["sink"], 32**-0.5)
    torch.testing.assert_close(out, golden["out"], atol=1e-6, rtol=0)
    assert not out[(index < 0).all(1)].any()


def test_it_is_the_formula_in_float64() -> None:
    q, kv, sink = randn(5, 3, 32), randn(5, 7, 32, seed=1), randn(3, seed=2)
    score = torch.einsum("thd,tnd->thn", q.double(), kv.double()) * 0.2
    weight = score.exp() / (score.exp().sum(-1, keepdim=True) + sink.double().exp().view(1, 3, 1))
    expected = torch.einsum("thn,tnd->thd", weight, kv.double())
    out = sink_attention(q, kv, torch.ones(5, 7, dtype=torch.bool), sink, 0.2)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=0)


def test_invalid_entries_have_no_influence() -> None:
    q, kv, sink = randn(4, 2, 32), randn(4, 6, 32, seed=1), randn(2, seed=2)
    valid = torch.rand(4, 6, generator=generator(3)) > 0.5
    other = torch.where(valid.unsqueeze(-1), kv, randn(4, 6, 32, seed=4) * 100)
    assert torch.equal(sink_attention(q, kv, valid, sink, 0.2), sink_attention(q, other, valid, sink, 0.2))


def test_a_row_without_valid_entries_gives_zeros() -> None:
    valid = torch.zeros(2, 5, dtype=torch.bool)
    assert not sink_attention(randn(2, 3, 16), randn(2, 5, 16), valid, torch.zeros(3), 1.0).any()


def test_a_large_sink_takes_the_weight_and_a_small_one_none() -> None:
    q, kv, valid = randn(1, 1, 16), randn(1, 4, 16), torch.ones(1, 4, dtype=torch.bool)
    assert sink_attention(q, kv, valid, torch.tensor([1e4]), 0.1).abs().max() == 0
    plain = ((q @ kv.transpose(1, 2)) * 0.1).softmax(-1) @ kv
    torch.testing.assert_close(sink_attention(q, kv, valid, torch.tensor([-1e4]), 0.1), plain)


@pytest.mark.parametrize("tokens", [0, 1, 2])
@pytest.mark.parametrize("entries", [0, 1, 5])
def test_edge_sizes(tokens: int, entries: int) -> None:
    valid = torch.ones(tokens, entries, dtype=torch.bool)
    out = sink_attention(randn(tokens, 3, 16), randn(tokens, entries, 16), valid, torch.zeros(3), 1.0)
    assert out.shape == (tokens, 3, 16)
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("heads", "entries", "channels"), [(8, 24, 64), (16, 136, 64), (3, 1, 32), (4, 9, 32), (8, 7, 64)]
)
def test_rows_are_independent(heads: int, entries: int, channels: int) -> None:
    sink = randn(heads, seed=2)
    valid = torch.rand(90, entries, generator=generator(3)) > 0.3
    assert_rows_independent(
        lambda q, kv, ok: sink_attention(q, kv, ok, sink, 0.1),
        randn(90, heads, channels),
        randn(90, entries, channels, seed=1),
        valid,
    )
