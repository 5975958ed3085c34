import asyncio
import os
import signal
import socket
import tomllib
from pathlib import Path
from typing import Any

import pytest
from epdserve.services.cli import up
from epdserve.services.cli.errors import CommandError
from epdserve.services.cli.settings import Chosen, fill_in


def options(folder: Path, **changed: Any) -> up.UpOptions:
    fields: dict[str, Any] = {
        "port": 0,
        "model": None,
        "config": None,
        "state_dir": folder / "state",
        "demo_model_dir": folder / "demo",
        "check": False,
    }
    return up.UpOptions(**{**fields, **changed})


def test_check_prints_settings_that_are_themselves_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "mine.toml"
    config.write_text("[decode.engine]\nnum_pages = 99\n")
    up.run(options(tmp_path, config=config, port=8123, check=True))
    table = tomllib.loads(capsys.readouterr().out)
    assert table["decode"]["engine"]["num_pages"] == 99
    assert table["router"]["port"] == 8123
    assert not (tmp_path / "state").exists()


def test_what_a_killed_up_left_goes_at_the_next_start(tmp_path: Path) -> None:
    state, left, scratch = tmp_path / "state", tmp_path / "epdserve-left", tmp_path / "epdserve-now"
    for folder in (state, left, scratch):
        folder.mkdir()
    (left / "cluster-token").write_text("secret")
    (state / "scratch").symlink_to(left)
    (state / "state.json").write_text("{}")
    with up.swept(state, scratch):
        assert not left.exists()
        assert not (state / "state.json").exists()
        assert (state / "scratch").readlink() == scratch
    assert not (state / "scratch").is_symlink()
    assert scratch.is_dir()  # whoever made it removes it


@pytest.mark.parametrize("name", ["mine", "elsewhere/epdserve-left"])
def test_a_folder_that_no_up_made_is_left_alone(tmp_path: Path, name: str) -> None:
    state, scratch = tmp_path / "state", tmp_path / "epdserve-now"
    state.mkdir()
    (tmp_path / name).mkdir(parents=True)
    (state / "scratch").symlink_to(tmp_path / name)
    with up.swept(state, scratch):
        assert (tmp_path / name).is_dir()


def test_check_and_start_refuse_roles_that_cannot_hand_over(tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text("[decode.engine]\nblock_tokens = 64\n")
    for check in (True, False):
        with pytest.raises(CommandError, match=r"mine\.toml: block_tokens is 32 .* and 64") as refused:
            up.run(options(tmp_path, config=config, check=check))
        assert len(str(refused.value).splitlines()) == 1


class EndedMachine:
    """A machine that ends at once; remembers how long requests had."""

    drain_s = -1.0

    async def stop(self, *, drain_s: float) -> None:
        self.drain_s = drain_s


async def test_the_end_says_what_it_waits_for_and_how_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = Chosen(tmp_path, "unix:///run/registry.sock", tmp_path / "token")
    table = {"router": {"drain_timeout_s": 7.0}, "pool": {"drain_timeout_s": 20.0}}
    settings = fill_in(table, chosen, port=None, source="test")
    machine = EndedMachine()
    await up._stop(machine, asyncio.Queue(), settings)  # type: ignore[arg-type]
    assert "running requests may finish, which takes 7 s at most; once more" in capsys.readouterr().err
    assert machine.drain_s == 20.0


@pytest.mark.parametrize(("before", "ends"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
async def test_a_terminal_that_closes_ends_it_unless_nohup_keeps_it(
    before: signal.Handlers, ends: bool
) -> None:
    loop, signals = asyncio.get_running_loop(), asyncio.Queue[signal.Signals]()
    found = signal.signal(signal.SIGHUP, before)
    try:
        up._catch(loop, signals)
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(signals.get(), 5) is (signal.SIGHUP if ends else signal.SIGTERM)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGHUP, found)


def test_a_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(CommandError, match="--port") as refused:
            up.run(options(tmp_path, port=taken.getsockname()[1]))
    assert len(str(refused.value).splitlines()) == 1


def test_a_model_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"there is no model in .*absent"):
        up.run(options(tmp_path, model=tmp_path / "absent"))


def test_too_little_memory_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epdserve.services.cli.checks.MIN_MEMORY_BYTES", 1 << 60)
    with pytest.raises(CommandError, match=r"memory: .* available; free some"):
        up.run(options(tmp_path, model=tmp_path / "absent"))


def test_a_missing_package_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epdserve.services.cli.checks.NEEDED_PACKAGES", ("no-such-package",))
    with pytest.raises(CommandError, match=r"^no-such-package: not installed; pip install .*$"):
        up.run(options(tmp_path, model=tmp_path / "absent"))


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        up.held(tmp_path / "state"),
        pytest.raises(CommandError, match="another up keeps its files"),
        up.held(tmp_path / "state"),
    ):
        pass


def test_a_free_port_is_free() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", up.free_port()))
