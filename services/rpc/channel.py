"""Channel and server settings, one place for both ends."""

from __future__ import annotations

from typing import Final

import grpc

# 1M token ids are 4 MB; a snapshot of blocks is sent in parts
MAX_MESSAGE_BYTES: Final = 64 * 2**20
KEEPALIVE_S: Final = 5.0
KEEPALIVE_TIMEOUT_S: Final = 5.0

_COMMON: Final = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # a stopped process keeps its sockets open: only pings notice
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CLIENT_OPTIONS: Final = (
    *_COMMON,
    ("grpc.enable_http_proxy", 0),  # workers are dialled by registry address, never through a proxy
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    (
        "grpc.min_reconnect_backoff_ms",
        1000,
    ),  # also how long one attempt may take: a busy machine accepts late
    ("grpc.max_reconnect_backoff_ms", 1000),
)

SERVER_OPTIONS: Final = (
    *_COMMON,
    # two servers on one port would share its calls at random
    ("grpc.so_reuseport", 0),
    # half the client's interval, or its pings are taken for an attack
    ("grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_S * 500)),
    ("grpc.http2.max_ping_strikes", 0),
)


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to a worker; connects when first used.

    Args:
        address: ``host:port`` from the registry.
    """
    return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
