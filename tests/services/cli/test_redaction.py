"""Secrets go, whatever notation they stand in; everything else stays."""

from pathlib import Path

import pytest
from epdserve.services.cli.redaction import REMOVED, Redactor, secrets_in
from hypothesis import given
from hypothesis import strategies as st

SECRET = "hunter2-hunter2-hunter2"


@pytest.mark.parametrize(
    "text",
    [
        'api_key = "{}"',
        '{{"api_key": "{}", "n": 1}}',
        "authorization: Bearer {}",
        "Authorization: {}",
        "EPDSERVE_API_KEY={}",
        "password={};user=x",
        "redis_password: '{}'",
        "--cluster-token {}",
        "cluster_token: {}",
        "url=redis://user:{}@host:6379/0",
        "rediss://:{}@host/0",
        "header Bearer {}",
        "sk-{}",
        "client_secret={}",
        'HF_TOKEN="{}"',
    ],
)
def test_named_and_shaped_secrets_are_removed(text: str) -> None:
    cleaned = Redactor().clean(text.format(SECRET))
    assert SECRET not in cleaned
    assert REMOVED in cleaned


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens = 64",
        '"prompt_tokens": 300, "queued_tokens": 4',
        "epdserve_router_prompt_tokens_total 17",
        'cluster_token_file = "/run/token"',
        'keys_file = "keys.txt"',
        '"token": 17, "message": "drawn"',
        "chunk_tokens = 256",
        "tokens a second: 4",
        'epdserve_kvstore_pages{phase="sealed"} 3',
        "num_pages = 99",
        "block_tokens is 32 and 64",
    ],
)
def test_innocent_text_stays_as_it_is(text: str) -> None:
    assert Redactor().clean(text) == text


@given(
    st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126), min_size=8, max_size=40), st.text()
)
def test_a_known_value_never_passes(secret: str, around: str) -> None:
    assert secret not in Redactor([secret]).clean(f"{around}{secret}{around}").replace(REMOVED, "")


def test_a_private_key_goes_as_a_whole() -> None:
    pem = "-----BEGIN RSA PRIVATE KEY-----\nabc\ndef\n-----END RSA PRIVATE KEY-----"
    assert Redactor().clean(f"x\n{pem}\ny") == f"x\n{REMOVED}\ny"


def test_files_of_secrets_tell_their_values(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('[tenants.alice]\nkeys = ["sha256:0123456789abcdef"]\n')
    assert "sha256:0123456789abcdef" in secrets_in(file)
    file.write_text("alice sk-plain-key-of-alice\n")
    assert "sk-plain-key-of-alice" in secrets_in(file)
    assert secrets_in(tmp_path / "absent") == []
