from __future__ import annotations

from epdserve.services.observability.metrics import new_registry
from epdserve.services.rpc.decode_server import DecodeSessions
from epdserve.services.rpc.metrics import DecodeSessionsCollector
from epdserve.services.types import FinishReason, TokenChunk
from prometheus_client import generate_latest


def test_figures_are_those_of_the_sessions() -> None:
    now = [100.0]
    sessions = DecodeSessions(
        worker="w", incarnation="1", submit=lambda _: None, cancel=lambda _: None, clock=lambda: now[0]
    )
    registry = new_registry(process=False)
    DecodeSessionsCollector(sessions, registry)
    router = sessions._desk.enter("r", "1")
    for name in ("a", "b"):
        router.outbox.open(name, offset=0)
        sessions._desk._owner[name] = "r"
    sessions._desk.publish([TokenChunk("a", 0, (1, 2), FinishReason.STOP), TokenChunk("b", 0, (3,))])
    sessions._desk.publish([TokenChunk("nobody", 0, (1,))])
    now[0] = 103.0
    text = generate_latest(registry).decode()
    for line in (
        "epdserve_rpc_decode_streams_total 1.0",
        "epdserve_rpc_decode_kept_tokens 3.0",
        "epdserve_rpc_decode_running_requests 1.0",
        "epdserve_rpc_decode_oldest_end_s 3.0",
        "epdserve_rpc_decode_chunks_ignored_total 1.0",
        'epdserve_rpc_decode_cancelled_total{reason="orphan"} 0.0',
    ):
        assert line in text.splitlines()
