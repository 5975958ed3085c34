"""Files of tenants: hashes only, names that are names, and errors that repeat no key."""

import hashlib

import pytest
from epdserve.services.router.tenancy.tenant import TenantLimits, hashed_key, read_tenants

KEY = "sk-very-secret"
HASHED = "sha256:" + hashlib.sha256(KEY.encode()).hexdigest()
DEFAULT = TenantLimits(requests_per_minute=10)


def test_a_file_names_keys_groups_and_limits() -> None:
    tenants = read_tenants(
        f"""
        [tenants.alice]
        keys = ["{HASHED}", "sha256:{"ab" * 32}"]
        group = "acme"
        tokens_per_minute = 500
        [tenants.bob]
        keys = ["{HASHED}"]
        requests_per_minute = 0
        """,
        DEFAULT,
    )
    alice, bob = tenants["alice"], tenants["bob"]
    assert alice.digests == (hashlib.sha256(KEY.encode()).digest(), b"\xab" * 32)
    assert alice.limits == TenantLimits(10, 500, 0)
    assert bob.limits.none
    assert (alice.cache_name, bob.cache_name) == ("group acme", "bob")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[tenants]",
        "tenants = 3",
        "[tenants.a]\nkeys = []",
        f'[tenants.a]\nkeys = ["{KEY}"]',
        f'[tenants.a]\nkeys = ["sha256:{KEY}"]',
        f'[tenants.a]\nkeys = ["{HASHED}"]\nlimit = 3',
        f'[tenants.a]\nkeys = ["{HASHED}"]\nconcurrent = -1',
        f'[tenants.a]\nkeys = ["{HASHED}"]\ngroup = "a b"',
        f'[tenants."a b"]\nkeys = ["{HASHED}"]',
        f'[other]\nx = 1\n[tenants.a]\nkeys = ["{HASHED}"]',
        f'[tenants.a\nkeys = ["{KEY}"]',
    ],
)
def test_files_that_will_not_do_are_refused_without_a_word_about_keys(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        read_tenants(text, DEFAULT)
    assert KEY not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_key_that_is_no_hash_is_not_repeated() -> None:
    for text in (KEY, f"sha256:{KEY}", "sha256:abcd", HASHED.removeprefix("sha256:")):
        with pytest.raises(ValueError, match="64 hex digits") as caught:
            hashed_key(text)
        assert text not in str(caught.value)
