"""The commands that containers run: one role a process. People on one machine want ``epdserve up``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    Path | None,
    typer.Option(help="TOML file; deploy/configs/dev.toml shows every key.", envvar="EPDSERVE_CONFIG"),
]
ModelOption = Annotated[
    Path, typer.Option(help="Checkpoint in the official format.", envvar="EPDSERVE_MODEL")
]
RegistryOption = Annotated[
    str, typer.Option(help="redis://, rediss:// or unix:// URL of the registry.", envvar="EPDSERVE_REGISTRY")
]
TokenOption = Annotated[Path, typer.Option(help="File with the cluster token.", envvar="EPDSERVE_TOKEN_FILE")]
SecretOption = Annotated[Path | None, typer.Option(help="File; wins over the one in the configuration.")]


def add_to(app: typer.Typer) -> None:
    """Make these commands of the command line."""
    app.command()(worker)
    app.command()(router)
    app.command()(pools)
    app.command("stop-worker")(stop_worker)


def worker(
    role: Annotated[str, typer.Argument(help="prefill, decode, encode or store.")],
    model: ModelOption,
    registry: RegistryOption,
    token_file: TokenOption,
    config: ConfigOption = None,
    name: Annotated[
        str, typer.Option(help="Unique in the cluster, the same over its lives.", envvar="EPDSERVE_NAME")
    ] = "",
    check: Annotated[
        bool, typer.Option("--check", help="Print the resolved settings and start nothing.")
    ] = False,
) -> None:
    """Run one worker in this process; SIGTERM drains it. EPDSERVE_HOST, EPDSERVE_PORT and others say where."""
    from epdserve.services.cli import roles
    from epdserve.services.cli.errors import CommandError
    from epdserve.services.pool.place import Place

    try:
        place = Place.from_environment()
    except ValueError as error:
        raise CommandError(f"the environment names a port that is none: {error}") from error
    cluster = roles.Cluster(config, model, registry, token_file)
    roles.run_worker(role, cluster, place, name=name or f"{role}-0", check=check)


def router(
    model: ModelOption,
    registry: RegistryOption,
    token_file: TokenOption,
    config: ConfigOption = None,
    name: Annotated[str, typer.Option(help="Unique among the routers.", envvar="EPDSERVE_NAME")] = "router-0",
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on.")] = None,
    keys_file: SecretOption = None,
    tenants_file: SecretOption = None,
    tls_cert_file: SecretOption = None,
    tls_key_file: SecretOption = None,
    tls_client_ca_file: SecretOption = None,
) -> None:
    """Run one router in this process, without torch; SIGTERM lets running requests end."""
    from epdserve.services.cli import roles

    cluster = roles.Cluster(config, model, registry, token_file)
    secrets = {
        "keys_file": keys_file,
        "tenants_file": tenants_file,
        "tls_cert_file": tls_cert_file,
        "tls_key_file": tls_key_file,
        "tls_client_ca_file": tls_client_ca_file,
    }
    roles.run_router(cluster, router_id=name, host=host, port=port, secrets=secrets)


def pools(
    model: ModelOption,
    registry: RegistryOption,
    token_file: TokenOption,
    config: ConfigOption = None,
    ray_address: Annotated[str, typer.Option(help="Of the Ray on this node.")] = "auto",
    prefill_gpus: Annotated[float, typer.Option(min=0, help="Of a prefill worker.")] = 0.0,
    decode_gpus: Annotated[float, typer.Option(min=0, help="Of a decode worker.")] = 0.0,
    encode_gpus: Annotated[float, typer.Option(min=0, help="Of an encode worker.")] = 0.0,
) -> None:
    """Keep the counted workers alive as actors of a Ray cluster, on nodes with a resource epdserve_ROLE."""
    from epdserve.services.cli import roles

    cluster = roles.Cluster(config, model, registry, token_file)
    gpus = {"prefill": prefill_gpus, "decode": decode_gpus, "encode": encode_gpus}
    roles.run_pools(cluster, ray_address=ray_address, gpus=gpus)


def stop_worker(
    pid_file: Annotated[Path, typer.Option(help="That the worker wrote.", envvar="EPDSERVE_PID_FILE")],
    wait_s: Annotated[float, typer.Option(min=0, help="For its end.")] = 60.0,
) -> None:
    """Drain the worker of this container and wait for its end: what runs before a pod goes."""
    from epdserve.services.cli import roles

    roles.stop_worker(pid_file, wait_s=wait_s)
