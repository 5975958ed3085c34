from epdserve.model.config import ModelConfig
from epdserve.model.demo.preset import DEMO_KEY, config_document
from epdserve.model.engram_plan import EngramPlan
from epdserve.model.kv_layout import EntryFormat, KVLayout
from epdserve.model.layer_plan import LayerMode, LayerPlan

CONFIG = ModelConfig.from_json(config_document(seed=0))


def test_every_mechanism_is_alive() -> None:
    plan = LayerPlan.of(CONFIG)
    assert {layer.mode for layer in plan.layers} == set(LayerMode)
    assert {layer.ratio for layer in plan.layers} == {0, 1, 2}
    assert any(layer.candidate_source for layer in plan.layers)
    assert len(plan.engram_layers) == 2
    assert plan.cut < len(plan.layers) - 1  # a causal decoder to leave out in replay
    assert CONFIG.text.hc_mult == 2
    assert CONFIG.text.rope_scaling.factor > 1


def test_engram_heights_follow_from_the_primes() -> None:
    assert len(EngramPlan.of(CONFIG).tables) == 2


def test_prompts_of_some_hundred_tokens_pass_window_top_k_and_pool() -> None:
    text = CONFIG.text
    assert (
        text.sliding_window < text.index_topk < text.candidate_topk_blocks * text.candidate_block_size < 500
    )
    assert text.max_position_embeddings >= 16384


def test_a_block_of_32_tokens_fills_one_small_page() -> None:
    layout = KVLayout.of(CONFIG, block_tokens=32, entry_format=EntryFormat.PACKED)
    assert layout.page_bytes == 4096
    assert layout.bytes_per_token == 106


def test_document_remembers_how_it_was_made() -> None:
    assert config_document(seed=5)[DEMO_KEY]["seed"] == 5
