import socket
from pathlib import Path

import pytest
from epdserve.services.cli import checks
from epdserve.services.cli.checks import Verdict


def test_a_port_in_use_is_not_fine_and_says_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        finding = checks.check_port("127.0.0.1", taken.getsockname()[1])
    assert finding.verdict is Verdict.NOT_FINE
    assert "--port" in finding.remedy


def test_a_free_port_is_fine() -> None:
    assert checks.check_port("127.0.0.1", 0).verdict is Verdict.FINE


@pytest.mark.parametrize(
    ("available_kib", "verdict"), [(512 * 1024, Verdict.NOT_FINE), (64 * 1024**2, Verdict.FINE)]
)
def test_memory_is_what_is_available(tmp_path: Path, available_kib: int, verdict: Verdict) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n")
    if verdict is Verdict.FINE and checks.check_memory().verdict is Verdict.NOT_FINE:
        pytest.skip("this container's own limit is below the need")
    assert checks.check_memory(meminfo).verdict is verdict


def test_disk_of_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert "free under" in checks.check_disk(tmp_path / "not" / "there").seen
    assert list(tmp_path.iterdir()) == []


def test_direct_io_leaves_nothing_behind(tmp_path: Path) -> None:
    assert checks.check_direct_io(tmp_path).subject == "direct I/O"
    assert list(tmp_path.iterdir()) == []


def test_missing_shared_memory_is_named(tmp_path: Path) -> None:
    assert checks.check_shared_memory(tmp_path / "shm").verdict is Verdict.NOT_FINE


def test_sizes_are_written_for_people() -> None:
    assert checks.gib(3 << 30) == "3.0 GiB"
