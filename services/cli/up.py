"""``epdserve up``: a whole server on this machine, from nothing to ready, and down again without a trace."""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from epdserve.services.cli import checks
from epdserve.services.cli.checks import Verdict
from epdserve.services.cli.errors import CommandError
from epdserve.services.cli.model_check import check_model
from epdserve.services.cli.settings import Chosen, UpSettings, fill_in, machine_config, read_table

if TYPE_CHECKING:
    from epdserve.services.cli.machine import Folders, Machine

TOKEN_BYTES = 32
SCRATCH_PREFIX = "epdserve-"


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What the command line says; None = the file or the default."""

    port: int | None
    model: Path | None
    config: Path | None
    state_dir: Path | None
    demo_model_dir: Path
    check: bool


def run(options: UpOptions) -> None:
    """Start, wait for a signal, stop.

    Raises:
        CommandError: Something is in the way, did not start, or ended.
    """
    table = read_table(options.config)
    source = str(options.config) if options.config else "defaults"
    machine = machine_config(table, source=source)
    port = free_port() if options.port == 0 else options.port
    model_dir = (options.model or machine.model_dir or options.demo_model_dir).absolute()
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX) as scratch:
        chosen = _choose(model_dir, Path(scratch))
        settings = fill_in(table, chosen, port=port, source=source)
        if options.check:
            _print_settings(settings)
            return
        state_dir = (options.state_dir or Path(".run") / str(settings.router.port)).absolute()
        _preflight(settings, state_dir)
        _need_model(model_dir, may_write=options.model is None and machine.model_dir is None)
        check_model(model_dir)
        with held(state_dir), swept(state_dir, Path(scratch)):
            _run_machine(settings, state_dir, Path(scratch))


def free_port() -> int:
    """A port of the loopback address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _choose(model_dir: Path, scratch: Path) -> Chosen:
    from epdserve.services.cli.embedded_registry import registry_url

    token_file = scratch / "cluster-token"
    descriptor = os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(TOKEN_BYTES))
    return Chosen(model_dir, registry_url(scratch), token_file)


def _print_settings(settings: UpSettings) -> None:
    from epdserve.services.config import config_text

    print(config_text(settings), end="")


def _preflight(settings: UpSettings, state_dir: Path) -> None:
    findings = (
        checks.check_platform(),
        checks.check_memory(),
        checks.check_disk(state_dir),
        checks.check_shared_memory(),
        checks.check_port(settings.router.host, settings.router.port),
        *map(checks.check_package, checks.NEEDED_PACKAGES),
    )
    for finding in findings:
        if finding.verdict is Verdict.NOT_FINE:
            raise CommandError(f"{finding.subject}: {finding.seen}; {finding.remedy}")


def _need_model(model_dir: Path, *, may_write: bool) -> None:
    if (model_dir / "config.json").is_file():
        return
    if not may_write:
        raise CommandError(
            f"there is no model in {model_dir}; write the demo model with: epdserve demo-model DIR"
        )
    from epdserve.services.cli import demo_model

    _say("demo model: writing it once")
    demo_model.run(model_dir)


@contextmanager
def held(state_dir: Path) -> Iterator[None]:
    """Keep a second ``up`` out of the same folder."""
    try:
        (state_dir / "logs").mkdir(parents=True, exist_ok=True)
        lock = (state_dir / "lock").open("w")
    except OSError as error:
        raise CommandError(f"cannot write to {state_dir}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(
                f"another up keeps its files in {state_dir}; give this one a --state-dir"
            ) from None
        yield


@contextmanager
def swept(state_dir: Path, scratch: Path) -> Iterator[None]:
    """Note where scratch lies, and remove what an ``up`` left that was killed: its scratch holds a token."""
    note = state_dir / "scratch"
    with suppress(OSError):
        left = note.readlink()
        if left.name.startswith(SCRATCH_PREFIX) and left.parent == scratch.parent and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
    for path in (note, state_dir / "state.json"):
        path.unlink(missing_ok=True)
    note.symlink_to(scratch)
    try:
        yield
    finally:
        note.unlink(missing_ok=True)


def _run_machine(settings: UpSettings, state_dir: Path, scratch: Path) -> None:
    # Imported here: Ray takes a second, and --check or a taken port need none of it.
    from epdserve.services.cli.machine import Folders, Machine
    from epdserve.services.observability.logs import setup_logging

    folders = Folders(state_dir, scratch)
    with (folders.logs / "up.log").open("a") as log:
        setup_logging(level=settings.machine.log_level, stream=log, fields={"role": "up"})
        reason = asyncio.run(_serve(Machine(settings, folders, _say), settings, folders))
    if reason:
        raise CommandError(reason)


async def _serve(machine: Machine, settings: UpSettings, folders: Folders) -> str:
    """Until a signal comes or something ends; the reason if it was no signal."""
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    asked = loop.create_task(signals.get())
    started_at = time.monotonic()
    _catch(loop, signals)
    starting = loop.create_task(machine.start())
    try:
        await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
        _catch(loop, signals)  # Ray has put its own handlers over ours
        if asked.done():
            return ""
        starting.result()
        _print_ready(machine.url, settings.router.model_name, folders.logs, time.monotonic() - started_at)
        watching = loop.create_task(machine.watch())
        await asyncio.wait({watching, asked}, return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        return "" if asked.done() else watching.result()
    finally:
        starting.cancel()
        await asyncio.wait({starting})
        await _stop(machine, signals, settings)
        asked.cancel()


async def _stop(machine: Machine, signals: asyncio.Queue[signal.Signals], settings: UpSettings) -> None:
    drain_s = settings.pool.drain_timeout_s
    # The router ends what runs at its own limit, and is ended at the pool's
    at_most_s = min(drain_s, settings.router.drain_timeout_s)
    _say(
        f"stopping: running requests may finish, which takes {at_most_s:.0f} s at most; once more to stop at once"
    )
    stopping = asyncio.create_task(machine.stop(drain_s=drain_s))
    again = asyncio.create_task(signals.get())
    await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if not stopping.done():
        stopping.cancel()
        await asyncio.wait({stopping})
        machine.kill()
        return
    stopping.result()


def _catch(loop: asyncio.AbstractEventLoop, signals: asyncio.Queue[signal.Signals]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A terminal that closes ends everything in order, too, unless nohup has said that it should not
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, signals.put_nowait, number)


def _say(line: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        print(f"==> {line}", file=sys.stderr, flush=True)


def _print_ready(url: str, model: str, logs: Path, took_s: float) -> None:
    print(
        f"""
epdserve is ready at {url} after {took_s:.0f} s. Logs are in {logs}. Ctrl-C stops it.

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
    "model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}], "temperature": 0, "max_tokens": 256}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="unused")
  answer = client.chat.completions.create(
      model="{model}", messages=[{{"role": "user", "content": "Hello"}}], temperature=0, max_tokens=256)
  print(answer.choices[0].message)

  epdserve chat --temperature 0 --url {url}
""",
        flush=True,
    )
