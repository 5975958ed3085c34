from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import pytest
from epdserve.services.config import ConfigError, config_keys, config_text, load_config
from pydantic import BaseModel, ConfigDict, Field


class Level(StrEnum):
    LOW = "low"


class Inner(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    ttl_s: float = Field(1.5, gt=0)
    names: tuple[str, ...] = ("a", 'b"\\\n')


class Outer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    port: int = Field(8000, ge=0)
    on: bool = True
    where: Path | None = None
    level: Level = Level.LOW
    inner: Inner = Inner()
    other: Inner | None = None


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "x.toml"


def test_file_and_defaults_make_the_settings(file: Path) -> None:
    file.write_text('port = 1\nwhere = "/x"\n[inner]\nttl_s = 2\n')
    assert load_config(file, Outer) == Outer(port=1, where=Path("/x"), inner=Inner(ttl_s=2))


def test_section_of_a_file_is_enough_and_may_be_absent(file: Path) -> None:
    file.write_text("[decode]\nport = 1\n")
    assert load_config(file, Outer, section="decode").port == 1
    assert load_config(file, Outer, section="prefill") == Outer()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "prot: unknown key"),
        ("port = -1", "port: Input should be greater than or equal to 0 (got -1)"),
        ("[inner]\nttl_s = 0", "inner.ttl_s: Input should be greater than 0 (got 0)"),
        ("inner = 3", "inner: must be a table (got 3)"),
        ("port = \n", "line 1"),
        ('level = "high"', "level: "),
    ],
)
def test_error_names_file_and_key_in_one_line(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_config(file, Outer)
    message = str(raised.value)
    assert message.startswith(str(file))
    assert said in message
    assert "\n" not in message


def test_all_errors_are_told_at_once_and_cut(file: Path) -> None:
    file.write_text(f'a = 1\nport = "{"x" * 500}"')
    with pytest.raises(ConfigError, match=r"port: .*; a: ") as raised:
        load_config(file, Outer)
    assert len(str(raised.value)) < 400


def test_absent_binary_and_misplaced_files_are_told(file: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(file, Outer)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(file, Outer)
    file.write_text("decode = 3")
    with pytest.raises(ConfigError, match="decode is no table"):
        load_config(file, Outer, section="decode")


def test_written_settings_load_as_themselves(file: Path) -> None:
    settings = Outer(port=3, where=Path("/a b"), other=Inner(ttl_s=9.0))
    file.write_text(config_text(settings))
    assert load_config(file, Outer) == settings


def test_keys_are_listed_with_their_tables() -> None:
    assert list(config_keys(Outer)) == [
        "port",
        "on",
        "where",
        "level",
        "inner.ttl_s",
        "inner.names",
        "other.ttl_s",
        "other.names",
    ]
