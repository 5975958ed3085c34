"""``epdserve bundle``: what somebody who helps has to see, in one archive, with the secrets taken out.

Versions, the machine, settings, what runs, the metrics of every process and the ends of the logs. Prompts and answers
are in none of them: logs never hold any.
"""

from __future__ import annotations

import io
import json
import os
import platform
import sys
import tarfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

import httpx
from epdserve.services.cli.errors import CommandError
from epdserve.services.cli.redaction import Redactor, secrets_in

LOG_BYTES: Final = 512 * 1024  # of each log its end
_ASK_S: Final = 5.0
_PATHS: Final = ("/version", "/ready", "/v1/models", "/metrics")
_SECRET_FILES: Final = ("cluster_token_file", "keys_file", "tenants_file", "tls_key_file", "admin_key_file")
_ENVIRONMENT: Final = ("EPDSERVE_", "RAY_", "UCX_", "OMP_", "NCCL_", "CUDA_", "OTEL_")


@dataclass(frozen=True, slots=True)
class BundleOptions:
    """What the command line says.

    Attributes:
        state_dir: Folder of the server's state.
        out: Archive to write.
        config: TOML file to put in, beside what the state folder has.
        secret_files: Further files whose contents must not be in it.
    """

    state_dir: Path
    out: Path
    config: Path | None = None
    secret_files: tuple[Path, ...] = ()


def run(options: BundleOptions) -> list[str]:
    """Write the archive; the names in it.

    Raises:
        CommandError: There is no such folder, or the archive cannot be written.
    """
    if not options.state_dir.is_dir():
        raise CommandError(f"{options.state_dir} is no folder of a server; name one with --state-dir")
    redactor = Redactor(_secrets(options))
    root = options.out.name.partition(".")[0]
    names = []
    try:
        descriptor = os.open(options.out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as sink, tarfile.open(fileobj=sink, mode="w:gz") as archive:
            for name, text in _contents(options):
                data = redactor.clean(text).encode("utf-8", "replace")
                entry = tarfile.TarInfo(f"{root}/{name}")
                entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
                archive.addfile(entry, io.BytesIO(data))
                names.append(name)
    except OSError as error:
        raise CommandError(f"cannot write {options.out}: {error.strerror}") from error
    return names


def _contents(options: BundleOptions) -> Iterator[tuple[str, str]]:
    """Names and texts, secrets still in them."""
    yield "versions.json", _json(_versions())
    yield "machine.json", _json(_machine())
    yield "environment.txt", _environment(os.environ)
    state = _state(options.state_dir)
    yield "state.json", _json(state)
    for path in sorted(options.state_dir.glob("*.toml")):
        yield f"settings/{path.name}", _end_of(path)
    if options.config is not None:
        yield f"settings/given-{options.config.name}", _end_of(options.config)
    yield from _answers(state)
    for path in sorted(_logs(options.state_dir)):
        yield f"logs/{path.name}", _end_of(path)


def _secrets(options: BundleOptions) -> Iterator[str]:
    """Values in all files that settings name as secret."""
    files = list(options.secret_files)
    settings = [*options.state_dir.glob("*.toml"), *([options.config] if options.config else [])]
    for path in settings:
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        files += [Path(value) for key, value in _leaves(table) if key in _SECRET_FILES and value]
    for file in files:
        yield from secrets_in(file)


def _leaves(table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        elif isinstance(value, str):
            yield key, value


def _versions() -> dict[str, Any]:
    packages = {str(found.metadata["Name"]): found.version for found in distributions()}
    return {"python": sys.version, "packages": dict(sorted(packages.items()))}


def _machine() -> dict[str, Any]:
    told: dict[str, Any] = {"platform": platform.platform(), "cpus": os.cpu_count(), "load": os.getloadavg()}
    for name in ("cpuinfo", "meminfo", "mounts"):
        text = _end_of(Path("/proc") / name)
        told[name] = text.split("\n\n")[0].splitlines() if name == "cpuinfo" else text.splitlines()
    told["limits"] = _end_of(Path("/proc/self/limits")).splitlines()
    return told


def _environment(environ: Mapping[str, str]) -> str:
    lines = [f"{name}={value}" for name, value in sorted(environ.items()) if name.startswith(_ENVIRONMENT)]
    return "\n".join(lines) + "\n"


def _state(folder: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"running": False}  # a bundle of what is left is useful, too
    return state


def _answers(state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What the processes say about themselves."""
    if "url" not in state:
        return
    addresses = {f"router{path.replace('/', '-')}": f"{state['url']}{path}" for path in _PATHS}
    for worker in state.get("workers", ()):
        if worker.get("metrics_address"):
            addresses[f"{worker['worker']}-metrics"] = f"http://{worker['metrics_address']}/metrics"
    with httpx.Client(
        trust_env=False, timeout=_ASK_S, verify=False
    ) as client:  # a certificate is no secret of ours
        for name, url in addresses.items():
            try:
                yield f"answers/{name}.txt", client.get(url).text
            except httpx.HTTPError as error:
                yield f"answers/{name}.txt", f"no answer: {type(error).__name__}\n"


def _logs(folder: Path) -> Iterator[Path]:
    logs = folder / "logs"
    for path in logs.glob("*"):
        if path.is_file():
            yield path
    ray = logs / "ray"
    if ray.is_dir():  # while it runs, its own logs lie where this link leads
        yield from (path for path in ray.glob("worker-*.err") if path.stat().st_size)


def _end_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END) if path.parts[:2] != ("/", "proc") else 0
            file.seek(max(0, size - LOG_BYTES))
            return file.read(LOG_BYTES if size else -1).decode("utf-8", "replace")
    except OSError as error:
        return f"cannot be read: {error.strerror}\n"


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"
