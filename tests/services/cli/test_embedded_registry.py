import tempfile
from pathlib import Path

from epdserve.services.cli.embedded_registry import registry_url, start_registry
from redis import Redis


async def test_the_registry_answers_on_a_private_socket_and_ends() -> None:
    with tempfile.TemporaryDirectory(prefix="epdserve-") as folder:
        server = await start_registry(Path(folder), log=Path(folder) / "registry.log")
        try:
            with Redis.from_url(registry_url(Path(folder))) as redis:
                assert redis.set("a", "b")
                assert redis.get("a") == b"b"
                assert redis.config_get("port") == {"port": "0"}
            assert (Path(folder) / "registry.sock").stat().st_mode & 0o077 == 0
        finally:
            await server.stop()
        assert server.exit_status() == "exit status 0"
