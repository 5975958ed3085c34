from __future__ import annotations

from pathlib import Path

import pytest
from epdserve.services.config import ConfigError, parse_config
from epdserve.services.pool.config import PoolConfig


def test_defaults_need_nothing_but_the_token() -> None:
    config = parse_config({"cluster_token_file": "x"}, PoolConfig, source="test")
    assert config.cluster_token_file == Path("x")


@pytest.mark.parametrize(
    ("key", "value"), [("heartbeat_s", 2.0), ("namespace", "a:b"), ("lease_s", 0), ("unknown", 1)]
)
def test_settings_that_cannot_work_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError):
        parse_config({"cluster_token_file": "x", key: value}, PoolConfig, source="test")
