import tomllib
from pathlib import Path
from typing import Any

import pytest
from epdserve.services.cli.errors import CommandError
from epdserve.services.cli.settings import Chosen, UpSettings, fill_in, machine_config, read_table
from epdserve.services.config import config_text
from epdserve.services.engine.image_config import ImageMode

CHOSEN = Chosen(Path("/models/demo"), "unix:///run/registry.sock", Path("/run/token"))


def filled(table: dict[str, Any], port: int | None = None) -> UpSettings:
    return fill_in(table, CHOSEN, port=port, source="file.toml")


def test_an_empty_file_gives_the_defaults_and_what_up_chose() -> None:
    settings = filled({})
    assert settings.router.model_dir == CHOSEN.model_dir
    assert settings.prefill.engine.model_dir == settings.decode.engine.model_dir == CHOSEN.model_dir
    assert settings.router.registry_url == settings.pool.redis_url == CHOSEN.registry_url
    assert settings.router.cluster_token_file == settings.pool.cluster_token_file == CHOSEN.token_file
    assert settings.router.port == 8000


def test_values_of_the_file_are_taken_and_the_table_stays_as_it_is() -> None:
    table: dict[str, Any] = {"router": {"port": 9000}, "decode": {"engine": {"num_pages": 77}}}
    assert filled(table).decode.engine.num_pages == 77
    assert filled(table).router.port == 9000
    assert filled(table, port=9001).router.port == 9001
    assert table == {"router": {"port": 9000}, "decode": {"engine": {"num_pages": 77}}}


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"routr": {}}, "routr"),
        ({"router": {"prot": 1}}, "router.prot"),
        ({"router": {"port": "many"}}, "router.port"),
        ({"router": []}, "router"),
        ({"prefill": {"engine": {"model_dir": "/x"}}}, "set by up itself"),
        ({"machine": {"decode_workers": 0}}, "machine.decode_workers"),
        ({"router": {"prot": 1}}, "unknown key"),
        ({"decode": {"engine": {"block_tokens": 64}}}, "block_tokens is 32 in .prefill.engine. and 64 in"),
        (
            {"prefill": {"engine": {"precision": "f32"}}},
            "precision is 'f32' in .prefill.engine. and 'f32q' in",
        ),
    ],
)
def test_what_does_not_fit_is_named_in_one_line(table: dict[str, Any], named: str) -> None:
    with pytest.raises(CommandError, match=named) as refused:
        filled(table)
    assert len(str(refused.value).splitlines()) == 1
    assert "file.toml" in str(refused.value)


def test_images_are_embedded_beside_prefill_unless_there_is_a_pool_for_them() -> None:
    assert filled({}).prefill.images.mode is ImageMode.LOCAL
    pool = filled({"machine": {"encode_workers": 2}, "encode": {"batch_patches": 99}})
    assert pool.prefill.images.mode is ImageMode.POOL
    assert (pool.encode.model_dir, pool.encode.batch_patches) == (CHOSEN.model_dir, 99)


def test_both_roles_may_be_set_alike() -> None:
    engine = {"engine": {"block_tokens": 64, "precision": "f32"}}
    assert filled({"prefill": engine, "decode": engine}).decode.engine.block_tokens == 64


def test_the_machine_s_section_can_be_read_alone() -> None:
    assert machine_config({"machine": {"model_dir": "m"}}, source="f").model_dir == Path("m")
    with pytest.raises(CommandError, match=r"\[machine\]"):
        machine_config({"machine": {"colour": 1}}, source="f")
    with pytest.raises(CommandError, match=r"\[machine\]: .*must be a table"):
        machine_config({"machine": 3}, source="f")


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    assert read_table(None) == {}
    broken = tmp_path / "broken.toml"
    broken.write_text("[machine\n")
    with pytest.raises(CommandError, match=r"broken\.toml is no TOML"):
        read_table(broken)
    with pytest.raises(CommandError, match="cannot read"):
        read_table(tmp_path / "absent.toml")


def test_a_store_has_the_blocks_of_its_workers() -> None:
    engine = {"engine": {"block_tokens": 64, "precision": "f32"}}
    settings = filled({"prefill": engine, "decode": engine})
    assert (settings.store.block_tokens, settings.store.precision.value) == (64, "f32")
    assert settings.store.model_dir == CHOSEN.model_dir
    with pytest.raises(CommandError, match=r"block_tokens is 32 in .prefill.engine. and 64 in .store."):
        filled({"store": {"block_tokens": 64}})


def test_a_machine_may_have_no_store_and_other_disks() -> None:
    assert not filled({"machine": {"store": False}}).machine.store
    directory = {"folder": "/mnt/a", "capacity_bytes": 1 << 30}
    settings = filled({"store": {"ssd": {"directories": [directory]}}})
    assert settings.store.ssd.directories[0].folder == Path("/mnt/a")
    again = tomllib.loads(config_text(settings.store))
    assert again["ssd"]["directories"] == [directory]
