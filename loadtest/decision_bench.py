"""``python -m epdserve.loadtest.decision_bench``: what deciding about one request costs, as the router runs it.

The router's own placer, block index, ledger, estimates and gate, with workers that are records only. Their records are
made anew as often as the registry is read (every 0.25 s at ``--rate`` requests a second), and arrays are made of them
between decisions, as the router does it 40 times a second; that is a row of its own. Times are CPU seconds of the event
loop's thread.
"""

import asyncio
import gc
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from random import Random
from typing import Annotated, Any, Final, cast

import numpy as np
import typer
from epdserve.kvstore.block_index import BlockIndex
from epdserve.kvstore.hashing import prefix_hash_chain
from epdserve.kvstore.types import BlockHash
from epdserve.services.policy.forecast import fixed
from epdserve.services.policy.joint import Placing, place
from epdserve.services.policy.pools import Links
from epdserve.services.router.cluster import Cluster
from epdserve.services.router.estimates import Estimates
from epdserve.services.router.fleets import Fleets
from epdserve.services.router.foresight import Foresight
from epdserve.services.router.ledger import InFlightLedger
from epdserve.services.router.request import GenerateRequest
from epdserve.services.router.routing import Placer
from epdserve.services.router.slo import SloSettings
from epdserve.services.router.snapshot import MEASURED_EVERY_S
from epdserve.services.sampling import SamplingParams
from epdserve.services.types import (
    DecodeReceipt,
    KVHandle,
    PrefillResult,
    TailRef,
    TokenIds,
    WorkerInfo,
    WorkerRole,
    WorkerState,
    token_ids,
)

_ROOT: Final = b"r" * 32
_KEY: Final = b"t" * 32
_BLOCK_TOKENS: Final = 128
_READ_EVERY_S: Final = 0.25
_PREPARED_EVERY_S: Final = MEASURED_EVERY_S / 2
_PROMPTS: Final = 16
_GC_ALLOCATIONS: Final = 20_000
_SETTINGS: Final = SloSettings(refuse_late=True, ttft_target_s=30.0, tpot_target_s=1.0)


class _Records:
    """What of the cluster a decision asks: the view and the index. The calls of the protocol are not made."""

    def __init__(self, infos: tuple[WorkerInfo, ...], index: BlockIndex) -> None:
        self.infos, self.index = infos, index
        self.lookup_s = 0.0

    def workers(self) -> Sequence[WorkerInfo]:
        return self.infos

    def hits(self, hashes: Sequence[bytes]) -> Mapping[str, int]:
        began_s = time.thread_time()
        found = self.index.longest_prefix(cast("Sequence[BlockHash]", hashes))
        self.lookup_s = time.thread_time() - began_s
        return found

    def read_again(self) -> None:
        """What the registry tells next: other records with other loads."""
        self.infos = tuple(replace(info, running=(info.running + 1) % 50) for info in self.infos)


class _Timed(Placer):
    """Tells what the event loop's thread spent on having the prompt's blocks named by another one."""

    named_s = 0.0

    async def _chain(self, *arguments: Any) -> Sequence[bytes]:
        began_s = time.thread_time()
        chain = await super()._chain(*arguments)
        self.named_s = time.thread_time() - began_s
        return chain


@dataclass(frozen=True, slots=True)
class _Scene:
    cluster: _Records
    placer: _Timed
    foresight: Foresight
    prompts: Sequence[TokenIds]


def main(
    workers: Annotated[int, typer.Option(min=2, help="Of each role; as many stores as half of them.")] = 256,
    tokens: Annotated[int, typer.Option(min=1, help="Of the prompt.")] = 100_000,
    tenants: Annotated[int, typer.Option(min=1, help="With recent requests.")] = 16,
    rate: Annotated[
        float, typer.Option(min=1.0, help="Decisions a second, for how often records change.")
    ] = 400.0,
    decisions: Annotated[int, typer.Option(min=10, help="How many.")] = 2000,
) -> None:
    """Print p50 and p99 of the whole decision and of its parts."""
    with ExitStack() as held:
        scene = _scene(workers, tokens, held)
        gc.collect()
        gc.freeze()  # both as a router does it once it has started
        gc.set_threshold(_GC_ALLOCATIONS)
        rows = asyncio.run(_decide(scene, decisions, tenants=tenants, rate=rate))
    rows["naming the blocks, in another thread"] = [
        _named_s(prompt) for _ in range(4) for prompt in scene.prompts
    ]
    rows["of it place() alone"] = _placed_s(scene, tokens, min(decisions, 500))
    for name, seconds in rows.items():
        ranked = sorted(seconds)
        p50, p99 = ranked[len(ranked) // 2], ranked[int(0.99 * len(ranked))]
        print(f"{name}: {p50 * 1e6:.0f} us p50, {p99 * 1e6:.0f} us p99")


def _scene(count: int, tokens: int, held: ExitStack) -> _Scene:
    draw = Random(1)
    prompts = [token_ids(draw.randrange(1, 100_000) for _ in range(tokens)) for _ in range(_PROMPTS)]
    infos = tuple(sorted(_infos(count, draw), key=lambda info: info.worker))
    index = _index(infos, prompts, draw)
    ledger, estimates = InFlightLedger(), Estimates()
    for number in range(8 * count):
        held.enter_context(ledger.hold(f"p{number % count:04}", draw.randrange(1, 100_000)))
        held.enter_context(
            ledger.hold(f"d{number % count:04}", draw.randrange(1, 100_000), output_tokens=500)
        )
    for number in range(3 * count // 4):  # the others have not answered yet
        estimates.prefilled(f"p{number:04}", _prefill_result(draw), expected_hit_tokens=0)
        estimates.decoded(
            f"d{number:04}", DecodeReceipt(f"d{number:04}", steps=100, decode_ms=draw.uniform(1e3, 4e3))
        )
    estimates.failed("p0001")
    cluster = _Records(infos, index)
    placer = _Timed(cast(Cluster, cluster), ledger, estimates=estimates)
    return _Scene(cluster, placer, Foresight(_SETTINGS, estimates), prompts)


async def _decide(scene: _Scene, decisions: int, *, tenants: int, rate: float) -> dict[str, list[float]]:
    whole, lookups, gate, naming, prepared = [], [], [], [], []
    read_every, prepared_every = (max(1, round(rate * each)) for each in (_READ_EVERY_S, _PREPARED_EVERY_S))
    for number in range(decisions):
        if number % read_every == 0:
            scene.cluster.read_again()
        if number % prepared_every == 0:
            began_s = time.thread_time()
            scene.placer.prepare()
            prepared.append(time.thread_time() - began_s)
        request = _request(scene.prompts[number % _PROMPTS], number, tenants)
        began_s = time.thread_time()
        forecast = scene.placer.estimates.forecast(request)
        route = await scene.placer.place(
            request.tokens,
            tenant_key=_KEY,
            forecast=forecast,
            request_id=request.request_id,
            targets=request.slo,
        )
        placed_s = time.thread_time()
        scene.foresight.admit(request, route, forecast)
        scene.foresight.schedule(request, forecast)
        ended_s = time.thread_time()
        whole.append(ended_s - began_s - scene.placer.named_s)
        naming.append(scene.placer.named_s)
        lookups.append(scene.cluster.lookup_s)
        gate.append(ended_s - placed_s)
        with scene.placer.ledger.hold(route.decode.worker, 10):
            pass
    return {
        "the whole decision, blocks named": whole,
        "of it the index": lookups,
        "of it the gate": gate,
        "having the blocks named, beside it": naming,
        "preparing, 40 times a second, beside it": prepared,
    }


def _placed_s(scene: _Scene, tokens: int, count: int) -> list[float]:
    fleets = Fleets(cast(Cluster, scene.cluster), scene.placer.ledger, scene.placer.estimates)
    (fleet,) = fleets.of((), deterministic=False).values()
    chain = prefix_hash_chain(scene.prompts[0], block_tokens=_BLOCK_TOKENS, root=_ROOT, tenant_key=_KEY)
    found = scene.cluster.hits(chain)
    pools = fleet.pools({name: _BLOCK_TOKENS * blocks for name, blocks in found.items()})
    took_s = []
    for number in range(count):
        wanted = Placing(str(number), tokens, fixed(500), 2.0, 0.05, 890.0, 128, b"x", 0.25)
        began_s = time.thread_time()
        place(*pools, Links(), wanted)
        took_s.append(time.thread_time() - began_s)
    return took_s


def _named_s(prompt: TokenIds) -> float:
    began_s = time.thread_time()
    prefix_hash_chain(prompt, block_tokens=_BLOCK_TOKENS, root=_ROOT, tenant_key=_KEY)
    return time.thread_time() - began_s


def _infos(count: int, draw: Random) -> list[WorkerInfo]:
    def info(name: str, role: WorkerRole, machine: int, **more: Any) -> WorkerInfo:
        fields: dict[str, Any] = {
            "queued_tokens": draw.randrange(100_000),
            "running": draw.randrange(50),
            **more,
        }
        free = draw.randrange(1_000_000)
        return replace(_WORKER, worker=name, role=role, machine=f"m{machine:04}", free_pages=free, **fields)

    return [
        *(
            info(f"p{n:04}", WorkerRole.PREFILL, n // 2, ssd_bytes_per_s=draw.uniform(1e9, 5e9))
            for n in range(count)
        ),
        *(info(f"d{n:04}", WorkerRole.DECODE, n // 2) for n in range(count)),
        *(info(f"s{n:04}", WorkerRole.STORE, n) for n in range(count // 2)),
    ]


def _index(infos: Sequence[WorkerInfo], prompts: Sequence[TokenIds], draw: Random) -> BlockIndex:
    """Each holder has 2,000 blocks of its own; every eighth has beginnings of prompts, too."""
    index, numbers = BlockIndex(), np.random.default_rng(1)
    chains = [
        prefix_hash_chain(prompt, block_tokens=_BLOCK_TOKENS, root=_ROOT, tenant_key=_KEY)
        for prompt in prompts
    ]
    holders = [info.worker for info in infos if info.role in (WorkerRole.PREFILL, WorkerRole.STORE)]
    for at, holder in enumerate(holders):
        raw = numbers.bytes(16 * 2000)
        blocks = [raw[start : start + 16] for start in range(0, len(raw), 16)]
        for chain in chains if at % 8 == 0 else ():
            blocks += chain[: draw.randrange(len(chain) + 1)]
        index.load_snapshot(holder, 0, cast("list[BlockHash]", blocks))
    return index


def _request(prompt: TokenIds, number: int, tenants: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r{number}",
        tokens=prompt,
        tenant_key=_KEY,
        sampling=SamplingParams(max_tokens=2000, seed=1),
        deadline_at=1e9,
        tenant=f"t{number % tenants}",
        slo=_SETTINGS.usual,
    )


def _prefill_result(draw: Random) -> PrefillResult:
    handle = KVHandle("p", "1", "lease", (), TailRef(0, 1, 4096, 0, True), 1000)
    return PrefillResult(handle, 0, 0, 1000, 0.0, draw.uniform(10.0, 30.0))


_WORKER: Final = WorkerInfo(
    worker="",
    role=WorkerRole.PREFILL,
    incarnation="1",
    address="127.0.0.1:1",
    metrics_address="127.0.0.1:2",
    state=WorkerState.READY,
    cache_root=_ROOT,
    block_tokens=_BLOCK_TOKENS,
    max_context_tokens=1_000_000,
    queued_tokens=0,
    running=0,
    free_pages=0,
    total_pages=1_000_000,
    step_age_s=0.0,
    wire_version=1,
    model_name="demo",
)


if __name__ == "__main__":
    typer.run(main)
