"""Who has which key: rotation by reload, and reloads that fail."""

import hashlib
import json
import os
from pathlib import Path

import pytest
from epdserve.services.errors import Unauthenticated, Unavailable
from epdserve.services.router.tenancy.directory import FileSource, RedisSource, TenantDirectory
from epdserve.services.router.tenancy.tenant import TenantLimits
from redis.asyncio import Redis
from support.valkey import url_of, valkey_server

NO_LIMITS = TenantLimits()


def hashed(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def write(path: Path, **keys: list[str]) -> None:
    lines = [
        f"[tenants.{name}]\nkeys = {json.dumps([hashed(key) for key in some])}" for name, some in keys.items()
    ]
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text("\n".join(lines))
    os.utime(path, ns=(before + 10**9, before + 10**9))


def name_of(directory: TenantDirectory, key: str) -> str:
    return directory.authenticate(authorization=f"Bearer {key}").name


async def test_keys_are_changed_without_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    write(path, alice=["old"], bob=["b"])
    directory = TenantDirectory([FileSource(path, NO_LIMITS)])
    directory.load_files()
    assert (name_of(directory, "old"), name_of(directory, "b")) == ("alice", "bob")
    write(path, alice=["old", "new"])
    await directory.refresh()
    assert name_of(directory, "old") == name_of(directory, "new") == "alice"
    write(path, alice=["new"])
    await directory.refresh()
    for gone in ("old", "b"):
        with pytest.raises(Unauthenticated):
            name_of(directory, gone)


async def test_a_reload_that_fails_leaves_the_door_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    write(path, alice=["a"])
    directory = TenantDirectory([FileSource(path, NO_LIMITS)])
    directory.load_files()
    for text in ("", "[tenants", None):
        path.unlink() if text is None else path.write_text(text)
        await directory.refresh()
        assert name_of(directory, "a") == "alice"
        with pytest.raises(Unauthenticated):
            name_of(directory, "x")
    assert directory.failures == 3


def test_a_file_that_will_not_do_keeps_the_router_from_starting(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("")
    for plain in (True, False):
        with pytest.raises(ValueError, match="t"):
            TenantDirectory([FileSource(tmp_path / "t", NO_LIMITS, plain=plain)]).load_files()
    with pytest.raises(OSError, match="none"):
        TenantDirectory([FileSource(tmp_path / "none", NO_LIMITS)]).load_files()


def test_lines_of_names_and_keys_are_tenants_too(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"alice plain-key # a comment\nalice {hashed('second')}\n")
    directory = TenantDirectory([FileSource(path, TenantLimits(concurrent=3), plain=True)])
    directory.load_files()
    assert name_of(directory, "plain-key") == name_of(directory, "second") == "alice"
    assert directory.tenants["alice"].limits.concurrent == 3


def test_without_any_source_nobody_needs_a_key() -> None:
    directory = TenantDirectory()
    assert directory.open
    assert directory.authenticate(authorization="").name == ""


@pytest.mark.parametrize(
    ("authorization", "api_key"),
    [("", ""), ("Bearer ", ""), ("Basic a", ""), ("Bearer x", "a"), ("", "x"), ("bearer A", "")],
)
def test_what_is_no_key_is_refused(tmp_path: Path, authorization: str, api_key: str) -> None:
    write(tmp_path / "t", alice=["a"])
    directory = TenantDirectory([FileSource(tmp_path / "t", NO_LIMITS)])
    directory.load_files()
    with pytest.raises(Unauthenticated):
        directory.authenticate(authorization=authorization, api_key=api_key)
    assert directory.authenticate(authorization="bearer a", api_key="x").name == "alice"
    assert directory.authenticate(authorization="", api_key="a").name == "alice"


async def test_tenants_in_redis_come_and_go_and_survive_its_death() -> None:
    with valkey_server() as server:
        redis = Redis.from_url(url_of(server), socket_timeout=1.0)
        directory = TenantDirectory([RedisSource(redis, "tenants", NO_LIMITS)])
        directory.load_files()
        with pytest.raises(Unavailable):
            name_of(directory, "a")
        await redis.hset("tenants", "alice", json.dumps({"keys": [hashed("a")], "concurrent": 2}))
        await directory.refresh()
        assert name_of(directory, "a") == "alice"
        assert directory.tenants["alice"].limits.concurrent == 2
        await redis.hset("tenants", "bob", "not json")
        await directory.refresh()
        server.terminate()
        await directory.refresh()
        assert name_of(directory, "a") == "alice"
        assert directory.failures == 2
        await redis.aclose()
