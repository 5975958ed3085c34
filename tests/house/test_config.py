"""Every configuration key is agreed on, and the file that shows them shows all of them with their defaults."""

from pathlib import Path
from typing import Any

from epdserve.services.cli.settings import AS_THE_POOL, FILLED_IN, Chosen, UpSettings, fill_in, read_table
from epdserve.services.config import config_keys
from support.repository import ROOT

DEV = ROOT / "deploy/configs/dev.toml"
CHOSEN = Chosen(Path("model"), "unix:///registry.sock", Path("token"))


def keys_of(table: dict[str, Any], prefix: str = "") -> set[str]:
    keys: set[str] = set()
    for name, value in table.items():
        keys |= keys_of(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name}
    return keys


def test_config_keys_are_the_agreed_list() -> None:
    agreed = (ROOT / "tests/house/config_keys.txt").read_text().split()
    assert sorted(config_keys(UpSettings)) == agreed


def test_the_development_file_holds_the_defaults() -> None:
    assert fill_in(read_table(DEV), CHOSEN, port=None, source=str(DEV)) == fill_in(
        {}, CHOSEN, port=None, source="none"
    )


def test_the_development_file_shows_every_key() -> None:
    ours = {f"{section}.{name}" for section, names in FILLED_IN.items() for name in names}
    ours |= {f"router.{name}" for name in AS_THE_POOL}
    text = DEV.read_text()
    # A key without a value by default cannot be written in TOML: it stands in a comment.
    missing = {
        key
        for key in set(config_keys(UpSettings)) - ours - keys_of(read_table(DEV))
        if f"# {key.rpartition('.')[2]} = " not in text
    }
    assert missing == set()
