"""Formulas of what a step costs hold against counts at the released config, and the roofline against its target."""

import json
import subprocess
import sys
from typing import Any

import pytest
from epdserve.model.config import ModelConfig
from epdserve.model.costs import Rate, Rows, flop, scored_entries, weighted
from epdserve.model.layer_plan import LayerPlan
from support.released_config import released_document

RELEASED = ModelConfig.model_validate(released_document())


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """In a process of its own: tables that kernels keep would be made without memory here."""
    config = tmp_path_factory.mktemp("config") / "config.json"
    config.write_text(json.dumps(released_document()))
    command = [sys.executable, "-m", "epdserve.loadtest.costs", str(config), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_counts_and_formulas_differ_by_less_than_one_percent(counted: dict[str, Any]) -> None:
    assert len(counted["counted"]) == 8
    for name, _, _, ratio in counted["counted"]:
        assert float(ratio) == pytest.approx(1, abs=0.01), name


def test_a_decode_step_at_a_million_tokens_takes_at_most_1_3_times_one_at_4096(
    counted: dict[str, Any],
) -> None:
    for batch, *_, ratio in counted["roofline_us"]:
        assert 1 < float(ratio) <= 1.3, batch


def test_weighted_flop_grows_by_about_a_quarter(counted: dict[str, Any]) -> None:
    """The report says a quarter; its weights of precisions are not published."""
    assert 1.1 < float(counted["growth"][-1][-1]) < 1.4


def test_an_early_chunk_of_a_prompt_costs_nothing_above_the_cut() -> None:
    whole, early = (sum(flop(RELEASED, Rows(2048, kept, 0, 2048)).values()) for kept in (2048, 0))
    assert 1.8 < whole / early < 2.1


def test_reindex_layers_score_the_candidate_pool_alone() -> None:
    reindex = LayerPlan.of(RELEASED).layers[24]
    assert scored_entries(RELEASED, reindex, Rows(1, 1, 1, 2**20)) == 16_384
    assert scored_entries(RELEASED, reindex, Rows(1, 1, 1, 2**20, scores_all=True)) == 2**20
    assert scored_entries(RELEASED, reindex, Rows(1, 1, 1, 512)) == 0  # all of them are taken


def test_weights_of_rates_are_those_of_bits() -> None:
    assert weighted({("a", Rate.FP8): 8, ("b", Rate.FP4): 8, ("c", Rate.BF16): 1}) == 7.0
