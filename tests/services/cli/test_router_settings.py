"""A router reads its part of the one file, and its command line wins where secrets and places are concerned."""

import subprocess
import sys
from pathlib import Path

import pytest
from epdserve.services.cli.errors import CommandError
from epdserve.services.cli.roles import Cluster, stop_worker
from epdserve.services.cli.router_settings import router_config


def cluster(tmp_path: Path, text: str) -> Cluster:
    file = tmp_path / "epdserve.toml"
    file.write_text(text)
    return Cluster(file, tmp_path / "model", "redis://registry:6379/0", tmp_path / "token")


def test_the_router_takes_its_own_section_and_what_the_pool_says(tmp_path: Path) -> None:
    text = '[machine]\nlog_level = "DEBUG"\n[router]\nport = 9\n[router.tenancy]\nconcurrent = 3\n[pool]\nlease_s = 7.0'
    told = cluster(tmp_path, text)
    config, level = router_config(
        told,
        {
            "router_id": "r-1",
            "port": 8080,
            "host": None,
            "tls_cert_file": Path("c"),
            "tls_key_file": Path("k"),
        },
    )
    assert (config.router_id, config.port, config.host, level) == ("r-1", 8080, "127.0.0.1", "DEBUG")
    assert (config.tenancy.concurrent, config.tenancy.tls_cert_file) == (3, Path("c"))
    assert (config.registry_lease_s, config.registry_url) == (7.0, "redis://registry:6379/0")
    assert config.model_dir == tmp_path / "model"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[rooter]\nport = 1", "unknown key rooter"),
        ("[router]\nprot = 1", "prot: unknown key"),
        ('[router]\nregistry_url = "redis://x"', "registry_url is set elsewhere"),
        ("[router", "is no TOML file"),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(CommandError, match=said) as error:
        router_config(cluster(tmp_path, text), {})
    assert "\n" not in str(error.value)


def test_a_router_needs_no_torch() -> None:
    program = (
        "import sys, epdserve.services.cli.roles, epdserve.services.cli.router_settings\n"
        "import epdserve.services.router.server\n"
        "print(sorted({'torch', 'triton', 'nixl', 'ray', 'safetensors'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.strip() == "[]"


def test_stopping_a_worker_waits_for_its_end_and_forgives_its_absence(tmp_path: Path) -> None:
    pid_file = tmp_path / "worker.pid"
    stop_worker(pid_file, wait_s=0)
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import signal; signal.signal(15, lambda *_: None); print(1, flush=True); signal.pause(); signal.pause()",
        ],
        stdout=subprocess.PIPE,
    ) as stubborn:
        assert stubborn.stdout is not None
        stubborn.stdout.readline()
        pid_file.write_text(f"{stubborn.pid}\n")
        with pytest.raises(CommandError, match="still runs"):
            stop_worker(pid_file, wait_s=0.3)
        stubborn.kill()
    stop_worker(pid_file, wait_s=0)
    pid_file.write_text("no number")
    with pytest.raises(CommandError, match=r"worker\.pid"):
        stop_worker(pid_file, wait_s=0)
