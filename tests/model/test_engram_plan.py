from pathlib import Path

import pytest
import torch
from epdserve.model.config import ModelConfig
from epdserve.model.engram_plan import EngramPlan
from epdserve.model.errors import ConfigError
from safetensors.torch import load_file
from support.released_config import released_document

GOLDEN = Path(__file__).parents[1] / "golden"


def test_released_constants_equal_the_golden_ones() -> None:
    golden = load_file(GOLDEN / "blocks" / "engram_hash.safetensors")
    plan = EngramPlan.of(ModelConfig.from_json(released_document()))
    assert [table.layer for table in plan.tables] == [1, 14]
    for row, table in enumerate(plan.tables):
        assert torch.equal(torch.tensor(table.multipliers), golden["multipliers"][row])
        assert torch.equal(torch.tensor(table.primes), golden["primes"][row].long())
        assert torch.equal(torch.tensor(table.offsets), golden["offsets"][row].long())


def test_released_tables_have_the_published_heights() -> None:
    plan = EngramPlan.of(ModelConfig.from_json(released_document()))
    assert [table.rows for table in plan.tables] == [384006168, 384016682]
    assert [table.columns for table in plan.tables] == [24, 24]


def test_no_prime_serves_twice() -> None:
    plan = EngramPlan.of(ModelConfig.from_directory(GOLDEN / "tiny"))
    primes = [prime for table in plan.tables for order in table.primes for prime in order]
    assert primes == [61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109]


def test_heights_that_do_not_follow_from_the_primes_are_refused() -> None:
    config = ModelConfig.from_json(released_document(engram_num_embeddings=[384006169, 384016682]))
    with pytest.raises(ConfigError, match="layer 1 is 384006169, its primes add up to 384006168"):
        EngramPlan.of(config)


def test_table_of_a_layer_without_one() -> None:
    plan = EngramPlan.of(ModelConfig.from_directory(GOLDEN / "tiny"))
    assert plan.table_of(4).layer == 4
    with pytest.raises(KeyError):
        plan.table_of(2)


def test_model_without_engram_has_no_tables() -> None:
    config = ModelConfig.from_json(released_document(engram_layer_ids=[], engram_num_embeddings=[]))
    assert EngramPlan.of(config).tables == ()
