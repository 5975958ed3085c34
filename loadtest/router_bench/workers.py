"""Workers without a model for the router's bench: real gRPC, answers as fast as they can be written.

Started by ``router_bench`` as a process of its own; the one place of the bench that knows the services from inside.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import uvloop
from epdserve.services.pool.registry import Registry
from epdserve.services.rpc.client import PrefillClient
from epdserve.services.rpc.decode_server import DecodeSessions
from epdserve.services.rpc.decode_session import DecodeSession
from epdserve.services.rpc.server import serve_decode, serve_prefill
from epdserve.services.types import (
    BlockUpdate,
    DecodeJob,
    DecodeReceipt,
    FinishReason,
    KVHandle,
    PrefillJob,
    PrefillResult,
    SamplingParams,
    TailRef,
    TokenChunk,
    TransferEndpoint,
    WorkerDescription,
    WorkerInfo,
    WorkerRole,
    WorkerState,
    token_ids,
)

_CONTEXT: Final = 1_048_576
_FIRST_ID: Final = 12_596  # eighteen plain words of the published vocabulary stand here
_WORDS: Final = 18
_BURST: Final = 16
_DEADLINE_S: Final = 10.0


def info_of(worker: str, role: WorkerRole, address: str) -> WorkerInfo:
    """A worker with room for anything."""
    fields: dict[str, Any] = {
        "worker": worker,
        "role": role,
        "incarnation": "0000000000000001-00000000",
        "address": address,
        "metrics_address": "127.0.0.1:1",
        "state": WorkerState.READY,
        "cache_root": b"r" * 32,
        "block_tokens": 128,
        "max_context_tokens": _CONTEXT,
        "queued_tokens": 0,
        "running": 0,
        "free_pages": 10**6,
        "total_pages": 10**6,
        "step_age_s": 0.0,
        "wire_version": 1,
        "model_name": "bench",
    }
    return WorkerInfo(**fields)


class Prefill:
    """Answers at once; nothing is computed."""

    def __init__(self) -> None:
        self._leases = itertools.count()

    async def run(self, job: PrefillJob, *, deadline_s: float | None) -> PrefillResult:
        """An empty handle."""
        leases = [f"lease{next(self._leases)}" for _ in range(job.readers)]
        tail = TailRef(0, 1, 4096, 0, True)
        handle = KVHandle("prefill-0", "1", leases[0], (), tail, len(job.tokens))
        return PrefillResult(handle, 0, 0, len(job.tokens), 0.0, 0.0, tuple(leases[1:]))

    async def release_lease(self, lease: str, *, incarnation: str) -> bool:
        """There is none."""
        return True

    async def abandon(self, request_id: str) -> None:
        """Nothing runs."""

    async def describe(self) -> WorkerDescription:
        """Facts nobody looks at."""
        return WorkerDescription(info_of("prefill-0", WorkerRole.PREFILL, ""), TransferEndpoint("a", b"", ()))

    async def watch_blocks(self) -> AsyncIterator[BlockUpdate]:
        """No blocks at all."""
        yield BlockUpdate("1", True, 0, 0, (), ())
        await asyncio.Event().wait()


class Decode(Prefill):
    """One token a step for every running request, with a pause of ``step_s`` between steps.

    Without a pause a step after the first has up to 16: smaller ones share frames anyway, and would only keep the
    router from its processor.
    """

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self._step_s = step_s
        self._running: dict[str, tuple[DecodeJob, int]] = {}
        self._work = asyncio.Event()
        self.sessions = DecodeSessions(
            worker="decode-0",
            incarnation="0000000000000001-00000000",
            submit=self._submit,
            cancel=self._cancel,
        )

    def _submit(self, job: DecodeJob) -> None:
        self._running[job.request_id] = (job, len(job.emitted))
        self._work.set()

    def _cancel(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    async def run_steps(self) -> None:
        """Step until cancelled."""
        while True:
            await self._work.wait()
            self._step()
            if not self._running:
                self._work.clear()
            await asyncio.sleep(self._step_s)

    def _step(self) -> None:
        chunks = []
        for request_id, (job, offset) in list(self._running.items()):
            left = job.sampling.max_tokens - offset
            tokens = script(offset, 1 if self._step_s or not offset else min(left, _BURST))
            if len(tokens) < left:
                chunks.append(TokenChunk(request_id, offset, tokens))
                self._running[request_id] = (job, offset + len(tokens))
                continue
            del self._running[request_id]
            receipt = DecodeReceipt("decode-0", steps=offset + len(tokens))
            chunks.append(TokenChunk(request_id, offset, tokens, FinishReason.LENGTH, None, receipt))
        if chunks:
            self.sessions.publish(chunks)


def script(offset: int, tokens: int) -> tuple[int, ...]:
    """What every answer says from ``offset`` on."""
    return tuple(_FIRST_ID + place % _WORDS for place in range(offset, offset + tokens))


async def serve(registry_url: str, token: str, ready: Path, step_s: float) -> None:
    """Serve both workers until told to end; ``ready`` is written when they are announced."""
    prefill, decode = Prefill(), Decode(step_s)
    servers = [
        await serve_prefill(prefill, token=token),
        await serve_decode(decode, decode.sessions, token=token),
    ]
    end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end.set)
    stepper = asyncio.create_task(decode.run_steps())
    async with Registry(registry_url, lease_s=3600) as registry:
        await registry.publish(info_of("prefill-0", WorkerRole.PREFILL, servers[0].address))
        await registry.publish(info_of("decode-0", WorkerRole.DECODE, servers[1].address))
        await asyncio.to_thread(ready.write_text, " ".join(server.address for server in servers))
        await end.wait()
    stepper.cancel()
    await asyncio.wait([stepper])
    for server in servers:
        await server.stop(grace_s=0)


async def first_tokens(addresses: str, token: str, count: int) -> list[float]:
    """Seconds to the first token of requests that go to the workers without a router, one after the other."""
    prefill_address, decode_address = addresses.split()
    prompt, nothing = token_ids(range(_FIRST_ID, _FIRST_ID + _WORDS)), token_ids(())
    sampling = SamplingParams(seed=0, max_tokens=_BURST)
    seconds = []
    async with (
        PrefillClient(prefill_address, token=token) as prefill,
        DecodeSession(decode_address, token=token, router_id="direct") as decode,
    ):
        for number in range(count):
            began = perf_counter()
            result = await prefill.run(PrefillJob(f"p{number}", prompt, b""), deadline_s=_DEADLINE_S)
            job = DecodeJob(f"d{number}", prompt, b"", False, sampling, result.handle, nothing)
            stream = decode.submit(job, deadline_s=_DEADLINE_S)
            await anext(stream)
            seconds.append(perf_counter() - began)
            async for _ in stream:
                pass
    return seconds


def main() -> None:
    """The process: the workers, or with ``--direct`` who asks them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--registry", default="")
    parser.add_argument("--direct", type=int, default=0, help="So many requests to the workers of --ready.")
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--ready", type=Path, required=True)
    parser.add_argument("--step-s", type=float, default=0.0)
    given = parser.parse_args()
    token = given.token_file.read_text().strip()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if given.direct:
            print(*runner.run(first_tokens(given.ready.read_text(), token, given.direct)))
        else:
            runner.run(serve(given.registry, token, given.ready, given.step_s))


if __name__ == "__main__":
    main()
