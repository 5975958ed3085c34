"""Renewed heads are new, and what has learnt something stays."""

import torch
from epdserve.model.config import ModelConfig
from epdserve.model.demo.preset import config_document
from epdserve.model.demo.training.circuits import LOOK_UP_LAYER
from epdserve.model.demo.training.renewal import renew_heads
from epdserve.model.demo.training.start import parameter_shapes

CONFIG = ModelConfig.from_json(config_document(1))


def renewed() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(2)
    before = {name: torch.randn(shape, generator=draw) for name, shape in parameter_shapes(CONFIG).items()}
    after = {name: value.clone() for name, value in before.items()}
    renew_heads(CONFIG, after, 3)
    return before, after


def test_only_attention_from_the_second_layer_on_changes() -> None:
    before, after = renewed()
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert moved
    assert all(".attn." in name and ".indexer." not in name for name in moved)
    assert {int(name.split(".")[1]) for name in moved} == {2, 3, 4, 5, 6, 7}


def test_the_look_up_head_stays_and_is_repeated_above() -> None:
    before, after = renewed()
    width, rank = CONFIG.text.head_dim, CONFIG.text.o_lora_rank
    for layer in range(LOOK_UP_LAYER, CONFIG.text.num_hidden_layers):
        own, source = f"layers.{layer}.attn.", f"layers.{LOOK_UP_LAYER}.attn."
        for name in ("wq_a.weight", "wkv.weight"):
            assert torch.equal(after[own + name], before[source + name])
        assert torch.equal(after[own + "wq_b.weight"][:width], before[source + "wq_b.weight"][:width])
        assert torch.equal(after[own + "wo_b.weight"][:, :rank], before[source + "wo_b.weight"][:, :rank])
    kept = after[f"layers.{LOOK_UP_LAYER}.attn.wo_a.weight"][:rank, :width]
    assert torch.equal(kept, before[f"layers.{LOOK_UP_LAYER}.attn.wo_a.weight"][:rank, :width])


def test_new_queries_are_small() -> None:
    _, after = renewed()
    width = CONFIG.text.head_dim
    assert after["layers.6.attn.wq_b.weight"][width:].std() < 0.1
    assert after["layers.2.attn.wq_b.weight"].std() < 0.1
    assert not after["layers.6.attn.attn_sink"][1:].any()
