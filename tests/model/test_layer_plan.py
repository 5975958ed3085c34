from epdserve.model.config import ModelConfig
from epdserve.model.layer_plan import LayerMode, LayerPlan
from support.released_config import released_document

FULL, REINDEX, REUSE, WINDOW = LayerMode.FULL, LayerMode.REINDEX, LayerMode.REUSE, LayerMode.WINDOW


def released_plan() -> LayerPlan:
    return LayerPlan.of(ModelConfig.from_json(released_document()))


def test_modes_of_the_released_layers() -> None:
    group = [FULL, *[REUSE] * 5]
    reindexed = [REINDEX, *[REUSE] * 3]
    expected = [WINDOW, WINDOW, *group * 3, FULL, *[REUSE] * 3, *reindexed * 4]
    assert [layer.mode for layer in released_plan().layers] == expected


def test_sources_of_the_released_layers() -> None:
    layers = released_plan().layers
    assert (layers[0].kv_source, layers[0].index_source, layers[0].ratio) == (None, None, 0)
    assert (layers[13].kv_source, layers[13].index_source, layers[13].ratio) == (8, 8, 2)
    assert (layers[23].kv_source, layers[23].index_source, layers[23].ratio) == (20, 20, 1)
    assert (layers[36].kv_source, layers[36].index_source) == (20, 36)
    assert (layers[39].kv_source, layers[39].index_source) == (20, 36)


def test_cut_candidates_and_engram_of_the_released_model() -> None:
    plan = released_plan()
    assert plan.kv_sources == (2, 8, 14, 20)
    assert plan.cut == 20
    assert plan.engram_layers == (1, 14)
    assert [layer.index for layer in plan.layers if layer.candidate_source] == [20]


def test_drafter_entries_of_the_ratios_are_no_layers() -> None:
    assert len(released_plan().layers) == 40


def test_full_layers_own_compressor_and_queries_reindex_layers_queries_only() -> None:
    layers = released_plan().layers
    assert [layer.index for layer in layers if layer.writes_cache] == [2, 8, 14, 20]
    assert [layer.index for layer in layers if layer.scores_entries] == [2, 8, 14, 20, 24, 28, 32, 36]
