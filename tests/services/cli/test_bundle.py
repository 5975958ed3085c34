"""The archive: what is in it, and above all what is not."""

import json
import tarfile
from pathlib import Path

import pytest
from epdserve.services.cli import bundle
from epdserve.services.cli.errors import CommandError

TOKEN, KEY, TENANT, MINE = (
    f"{name}-0123456789abcdef" for name in ("cluster-token", "sk-alice", "hashed-of-bob", "something-else")
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = tmp_path / "state"
    (state / "logs").mkdir(parents=True)
    (tmp_path / "token").write_text(TOKEN + "\n")
    (tmp_path / "keys").write_text(f"alice {KEY}\n")
    (tmp_path / "tenants.toml").write_text(f'[tenants.bob]\nkeys = ["{TENANT}"]\n')
    (tmp_path / "other").write_text(MINE)
    settings = {"cluster_token_file": "token", "keys_file": "keys"}
    lines = [f'{name} = "{tmp_path / file}"' for name, file in settings.items()]
    lines += ['registry_url = "redis://:swordfish99@db:6379/0"', "max_connections = 77"]
    lines += ["[tenancy]", f'tenants_file = "{tmp_path / "tenants.toml"}"']
    (state / "router.toml").write_text("\n".join(lines))
    said = f"started with {TOKEN} and {KEY}, {TENANT}, {MINE}, Bearer abcdefgh12345678"
    (state / "logs" / "router.log").write_text("x" * bundle.LOG_BYTES + said + "\nlast line\n")
    (state / "state.json").write_text(
        json.dumps(
            {
                "url": "http://127.0.0.1:9",
                "workers": [{"worker": "decode-0", "metrics_address": "127.0.0.1:9"}],
            }
        )
    )
    return state


def read(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as tar:
        files = {entry.name: tar.extractfile(entry) for entry in tar}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def test_secrets_are_nowhere_in_the_archive(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPDSERVE_API_KEY", "sk-of-the-environment-1234")
    monkeypatch.setenv("EPDSERVE_NOTE", f"see {TOKEN}")
    out = tmp_path / "help.tar.gz"
    bundle.run(bundle.BundleOptions(folder, out, secret_files=(tmp_path / "other",)))
    files = read(out)
    whole = "\n".join(files.values())
    for secret in (TOKEN, KEY, TENANT, MINE, "swordfish99", "abcdefgh12345678", "sk-of-the-environment"):
        assert secret not in whole
    assert "max_connections = 77" in files["help/settings/router.toml"]
    assert files["help/logs/router.log"].endswith("last line\n")
    assert len(files["help/logs/router.log"]) <= bundle.LOG_BYTES
    assert "no answer" in files["help/answers/decode-0-metrics.txt"]
    assert json.loads(files["help/versions.json"])["packages"]["pydantic"]
    assert out.stat().st_mode & 0o777 == 0o600


def test_what_has_ended_leaves_a_bundle_too(folder: Path, tmp_path: Path) -> None:
    (folder / "state.json").unlink()
    names = bundle.run(bundle.BundleOptions(folder, tmp_path / "b.tar.gz", config=folder / "router.toml"))
    assert "settings/given-router.toml" in names
    assert json.loads(read(tmp_path / "b.tar.gz")["b/state.json"]) == {"running": False}


def test_no_folder_and_no_place_to_write_are_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="--state-dir"):
        bundle.run(bundle.BundleOptions(tmp_path / "absent", tmp_path / "b.tar.gz"))
    with pytest.raises(CommandError, match="cannot write"):
        bundle.run(bundle.BundleOptions(folder, tmp_path / "no" / "b.tar.gz"))
