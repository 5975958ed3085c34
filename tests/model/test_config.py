import json
from pathlib import Path
from typing import Any

import pytest
from epdserve.model.config import ModelConfig
from epdserve.model.errors import ConfigError
from pydantic import ValidationError
from support.released_config import released_document

TINY = Path(__file__).parents[1] / "golden" / "tiny"


def problems_of(document: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_json(document)
    return error.value.problems


def test_released_config_is_accepted_whole() -> None:
    config = ModelConfig.from_json(released_document())
    assert config.text.rope_scaling.original_max_position_embeddings == 65536
    assert config.vision is not None
    assert config.vision.min_pixels == 544**2
    assert len(config.text.compress_ratios) == 43  # three more than layers: the drafter's


def test_golden_config_is_read_from_its_directory() -> None:
    config = ModelConfig.from_directory(TINY)
    assert config.text.swiglu_limit == 1.5
    assert config.vision is None


def test_a_config_cannot_be_changed() -> None:
    config = ModelConfig.from_json(released_document())
    with pytest.raises(ValidationError):
        config.text.sliding_window = 64


def test_unknown_keys_are_ignored() -> None:
    document = released_document(some_new_key=1)
    document["transformers_version"] = "5"
    ModelConfig.from_json(document)


def test_all_type_errors_are_named_at_once() -> None:
    document = released_document(hidden_size="big", hidden_act="gelu", head_dim=-1)
    del document["eos_token_id"]
    problems = problems_of(document)
    for part in ("text_config.hidden_size", "text_config.hidden_act", "text_config.head_dim", "eos_token_id"):
        assert any(problem.startswith(part) for problem in problems), part


def test_all_inconsistencies_are_named_at_once() -> None:
    problems = problems_of(released_document(hidden_size=5000, o_groups=7, num_experts_per_tok=400))
    assert len(problems) == 3
    assert "hidden_size=5000" in problems[0]


def test_message_lists_every_problem_on_a_line_of_its_own() -> None:
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_json(released_document(hidden_size=5000, qk_rope_head_dim=63))
    assert str(error.value).count("\n") == 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"vocab_size": 1000}, "image_token_id=129264"),
        ({"index_head_dim": 48}, "index_head_dim=48"),
        ({"index_head_dim": 32}, "qk_rope_head_dim=64 exceeds index_head_dim=32"),
        ({"compress_ratios": [0, 0] + [2] * 18}, "compress_ratios has 20 entries"),
        ({"kv_source_layer_ids": [8, 2, 14, 20]}, "strictly ascending"),
        ({"kv_source_layer_ids": [2, 2, 14, 20]}, "strictly ascending"),
        ({"kv_source_layer_ids": [2, 8, 14, 20, 40]}, "past the last"),
        ({"kv_source_layer_ids": [2, 8, 14, 20, 21]}, "must also be in index_source_layer_ids"),
        ({"kv_source_layer_ids": [8, 14, 20]}, "layer 2 has compress_ratio 2 but no KV source"),
        ({"kv_source_layer_ids": [2, 8, 14], "candidate_source_layer_id": 14}, "its KV source 14 has 2"),
        ({"index_source_layer_ids": [1, 2, 8, 14, 20]}, "layer 1 is an index source"),
        ({"index_source_layer_ids": [2, 4, 8, 14, 20]}, "layer 4 re-indexes the cache of 2"),
        ({"candidate_source_layer_id": 24}, "candidate_source_layer_id=24 must be a KV source"),
        ({"candidate_topk_blocks": 64}, "guarantee 505 candidates"),
        ({"engram_num_embeddings": [384006168]}, "names 2 layers"),
        ({"engram_compressed_vocab_size": 200000}, "exceeds vocab_size"),
        ({"compress_ratios": [0, 0] + [4] * 18 + [1] * 20}, "compress_ratios.2"),
        ({"engram_max_ngram_size": 3}, "engram_max_ngram_size"),
        ({"attention_bias": True}, "attention_bias"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_scaling": None}, "rope_scaling"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:40],
)
def test_what_the_code_relies_on_is_checked(changes: dict[str, Any], expected: str) -> None:
    assert any(expected in problem for problem in problems_of(released_document(**changes)))


def test_yarn_numbers_are_checked() -> None:
    scaling = {**released_document()["text_config"]["rope_scaling"], "factor": 0.5, "beta_fast": 1}
    assert len(problems_of(released_document(rope_scaling=scaling))) == 2


def test_pool_that_just_covers_the_picks_is_accepted() -> None:
    # spec 9.1: 65 blocks of 8 guarantee 513 candidates
    ModelConfig.from_json(released_document(candidate_topk_blocks=65))


def test_other_block_size_of_weights_is_refused() -> None:
    document = released_document()
    document["quantization_config"]["weight_block_size"] = [128, 128]
    assert "must be [32, 32]" in problems_of(document)[0]


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", None], ids=["cut", "list", "bytes", "absent"])
def test_unreadable_file_is_a_config_error(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_directory(tmp_path)


def test_document_survives_a_round_trip_through_the_model() -> None:
    config = ModelConfig.from_json(released_document())
    assert ModelConfig.from_json(json.loads(config.model_dump_json(by_alias=True))) == config
