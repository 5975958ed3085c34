"""Runs the application: uvicorn with uvloop and httptools, limits, a clean end on SIGTERM and SIGINT."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn
import uvloop
from epdserve.services.errors import InvalidRequest
from epdserve.services.observability.certificate import watch_certificate
from epdserve.services.observability.metrics import new_registry
from epdserve.services.pool.registry import Registry
from epdserve.services.pool.view import ClusterView
from epdserve.services.router.app import RouterApp, create_app
from epdserve.services.router.cluster_metrics import ClusterCollector
from epdserve.services.router.config import RouterConfig
from epdserve.services.router.http_protocol import protocol_with
from epdserve.services.router.listening import BACKLOG, bind
from epdserve.services.router.metrics import RouterMetrics
from epdserve.services.router.operations import RouterOperations
from epdserve.services.router.parts import RouterParts
from epdserve.services.router.policy_metrics import PolicyCollector
from epdserve.services.router.routing import Placer
from epdserve.services.router.rpc_cluster import RpcCluster
from epdserve.services.router.sharing import sharing
from epdserve.services.router.snapshot import MEASURED_EVERY_S
from epdserve.services.router.tenancy.admin import create_admin, read_admin_key
from epdserve.services.router.tenancy.assembly import listening_host
from epdserve.services.router.tenancy.metrics import GateCollector
from epdserve.services.rpc.auth import read_token
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

_ADMIN_END_S = 5.0
_SAMPLE_S = 5.0
# Threads that render or check grammars give Python's lock back within this; the default of 5 ms would show in streams
_SWITCH_INTERVAL_S = 0.000_5

# A request leaves next to nothing for the collector, which would look after every few of them
_GC_ALLOCATIONS = 20_000

_log = logging.getLogger(__name__)


class RouterServer(uvicorn.Server):
    """Uvicorn's server, ending where it was called.

    Uvicorn raises the signal that ended it once more, which would cut off what is to be closed after it.
    """

    async def serve_quietly(self, sock: socket.socket) -> None:
        """Serve without a say about signals, beside another server that has it."""
        await self._serve(sockets=[sock])

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT ask to end; a second SIGINT ends without waiting."""
        loop = asyncio.get_running_loop()
        wanted = (signal.SIGTERM, signal.SIGINT)
        for number in wanted:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in wanted:
                loop.remove_signal_handler(number)


def uvicorn_server(app: FastAPI, config: RouterConfig) -> RouterServer:
    """A server for the application with the router's limits; not started."""
    return RouterServer(
        uvicorn.Config(
            app,
            http=protocol_with(
                max_header_bytes=config.max_header_bytes,
                header_timeout_s=config.header_timeout_s,
                max_connections=config.max_connections,
            ),
            loop="uvloop",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=BACKLOG,
            ssl_certfile=config.tenancy.tls_cert_file,
            ssl_keyfile=config.tenancy.tls_key_file,
            ssl_ca_certs=_text(config.tenancy.tls_client_ca_file),
            ssl_cert_reqs=ssl.CERT_REQUIRED if config.tenancy.tls_client_ca_file else ssl.CERT_NONE,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, round(config.drain_timeout_s)),
        )
    )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


@asynccontextmanager
async def administered(app: RouterApp, config: RouterConfig) -> AsyncIterator[None]:
    """Administration on a port of its own on loopback until the block ends; nothing without one.

    Raises:
        Unavailable: The port is taken.
        InvalidRequest: No cluster token.
        OSError, ValueError: The file of the administrator's key will not do.
    """
    if config.tenancy.admin_port is None:
        yield
        return
    parts = app.state.parts
    key = read_admin_key(config.tenancy.admin_key_file)
    desk = create_admin(parts.gate, RouterOperations(parts, token=_token(config)), key=key)
    with bind("127.0.0.1", config.tenancy.admin_port) as sock:
        _log.info("administration listens", extra={"port": sock.getsockname()[1]})
        server = RouterServer(
            uvicorn.Config(desk, loop="uvloop", ws="none", lifespan="off", log_config=None, access_log=False)
        )
        task = asyncio.create_task(server.serve_quietly(sock), name="administration")
        sampling = asyncio.create_task(_sample_tiers(parts), name="sample-tiers")
        try:
            yield
        finally:
            sampling.cancel()
            server.should_exit = True
            await asyncio.wait([task, sampling], timeout=_ADMIN_END_S)


async def _sample_tiers(parts: RouterParts) -> None:
    """For the console's plot over time."""
    while True:
        parts.present.sample_tiers(parts.metrics.prefix_tokens, at=time.time())
        await asyncio.sleep(_SAMPLE_S)


@asynccontextmanager
async def shared(app: FastAPI, config: RouterConfig, registry: CollectorRegistry) -> AsyncIterator[None]:
    """What placement knows is shared with the other routers, and can be read as metrics, until the block ends."""
    parts = app.state.parts
    async with sharing(
        config.registry_url,
        namespace=config.registry_namespace,
        router_id=config.router_id,
        ledger=parts.placer.ledger,
        lengths=parts.placer.estimates.lengths,
        meter=parts.foresight.meter,
    ) as desk:
        PolicyCollector(parts.placer.estimates, parts.foresight, desk, registry)
        preparing = asyncio.create_task(_prepare_regularly(parts.placer), name="prepare-placement")
        try:
            yield
        finally:
            preparing.cancel()
            await asyncio.wait([preparing])


async def _prepare_regularly(placer: Placer) -> None:
    """Arrays of a new view and new measurements are made between decisions, not in them."""
    while True:
        await asyncio.sleep(MEASURED_EVERY_S / 2)
        placer.prepare()


def _token(config: RouterConfig) -> str:
    if config.cluster_token_file is None:
        raise InvalidRequest("cluster_token_file is not set", param="cluster_token_file")
    return read_token(config.cluster_token_file)


@asynccontextmanager
async def connected(config: RouterConfig) -> AsyncIterator[RpcCluster]:
    """The cluster that the settings name, not started: the application's lifespan does that.

    Raises:
        InvalidRequest: No cluster token.
    """
    token = _token(config)
    registry = Registry(
        config.registry_url, namespace=config.registry_namespace, lease_s=config.registry_lease_s
    )
    async with registry:
        view = ClusterView(registry, lease_s=config.registry_lease_s, refresh_s=config.registry_refresh_s)
        yield RpcCluster(view, token=token, router_id=config.router_id)


async def serve(config: RouterConfig, listener: socket.socket | None = None) -> None:
    """Serve until told to end; what runs may finish within ``drain_timeout_s``.

    Args:
        listener: Already listening, in place of the address of the settings: connections that come while one router
            ends and the next one starts wait in it.

    Raises:
        Unavailable: The address cannot be bound.
        InvalidRequest: The cluster token is missing.
        FileNotFoundError, ValueError: The model directory or the keys file will not do.
    """
    keyless = not (config.keys_file or config.tenancy.tenants_file or config.tenancy.tenants_in_redis)
    with listener or bind(listening_host(config.host, config.tenancy, keyless=keyless), config.port) as sock:
        async with connected(config) as cluster:
            registry = new_registry()
            registry.register(ClusterCollector(cluster))
            app = create_app(config, cluster, metrics=RouterMetrics(registry))
            GateCollector(app.state.parts.gate, registry)
            if config.tenancy.tls_cert_file is not None:
                watch_certificate(config.tenancy.tls_cert_file, registry)
            # What is loaded by now stays for ever: collections need not walk it, and pause streams less
            gc.collect()
            gc.freeze()
            gc.set_threshold(_GC_ALLOCATIONS)
            async with administered(app, config), shared(app, config, registry):
                await uvicorn_server(app, config).serve(sockets=[sock])


def run(config: RouterConfig, listener: socket.socket | None = None) -> None:
    """``serve`` on an event loop of its own; what a process's main calls. Raises as ``serve``."""
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, listener))
