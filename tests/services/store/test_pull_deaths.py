"""A store's process stops or dies of a signal while another machine's store reads from it, over TCP."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from support.store import Stage, offload, role_table, stage
from support.store_customer import Customer
from support.store_process import DOOM
from support.store_worker import chain

pytestmark = pytest.mark.integration

BATCH, SLOTS, DEADLINE_S = 8, 64, 1.0
TCP = {"UCX_TLS": "tcp,self"}
QUARANTINED = 'epdserve_kvstore_slots{pool="host_blocks",state="quarantined"}'
FREE = 'epdserve_kvstore_slots{pool="host_blocks",state="free"}'


async def until_metric(scene: Stage, sample: str, wanted: float) -> None:
    async with asyncio.timeout(30):
        while await scene.metric("store-1", sample) != wanted:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.05)


async def outcomes(scene: Stage) -> dict[str, float]:
    """What became of blocks that store-1 asked its neighbour for."""
    names = ("done", "missing", "unreached", "unread", "late", "lease_lost", "corrupt", "no_room")
    sample = 'epdserve_store_peer_blocks_total{{outcome="{}"}}'
    counts = {name: await scene.metric("store-1", sample.format(name)) for name in names}
    return {name: count for name, count in counts.items() if count}


async def ends_short(customer: Customer, hashes: tuple[bytes, ...], wanted: list[str]) -> None:
    """A fetch that a neighbour spoils gives what there is before it, within the deadlines of its calls."""
    began = time.monotonic()
    assert await customer.take(hashes) == wanted
    assert time.monotonic() - began < 4 * DEADLINE_S + 2.0  # lend, read, end the loan; and a busy machine


async def use_every_other_slot(scene: Stage, customer: Customer) -> list[tuple[bytes, ...]]:
    """Give new owners to all slots of store-1 but those in quarantine; what they hold, newest last."""
    client, chains = await scene.client("store-1"), []
    for number in range(2 * SLOTS // BATCH):
        hashes = chain(f"n{number}-", BATCH)
        if "taken" in await offload(client, customer.reader.offer(hashes)):
            chains.append(hashes)
    assert await scene.metric("store-1", FREE) == 0
    return chains[-4:]


async def test_a_peer_that_stops_or_dies_mid_pull_is_a_miss_in_time_and_spoils_nothing(
    tmp_path: Path,
) -> None:
    order = tmp_path / "order"
    async with stage(tmp_path, lease_s=60.0) as scene:
        _, _, writer, reader = await asyncio.gather(
            scene.spawn("store-0", machine="m0", env={**TCP, DOOM: str(order)}, **role_table()),
            scene.spawn(
                "store-1", machine="m1", env=TCP, **role_table(blocks=SLOTS, peer_deadline_s=DEADLINE_S)
            ),
            scene.worker("prefill-0", machine="m0"),
            scene.worker("decode-1", machine="m1"),
        )
        hashes, customer = chain("a", 4 * BATCH), await Customer.of(scene, reader, "store-1")
        await offload(await scene.client("store-0"), writer.offer(hashes))
        await until_metric(scene, "epdserve_store_neighbour_blocks", len(hashes))
        assert await customer.take(hashes[:BATCH]) == ["peer"] * BATCH

        order.write_text("SIGSTOP")
        await ends_short(customer, hashes, ["host"] * BATCH)
        assert await outcomes(scene) == {"done": BATCH, "late": BATCH}
        assert await scene.metric("store-1", QUARANTINED) == BATCH
        newcomers = await use_every_other_slot(scene, customer)
        assert await scene.metric("store-1", QUARANTINED) == BATCH
        scene.thaw(scene.processes["store-0"])
        await until_metric(scene, QUARANTINED, 0)  # the late bytes have landed, in slots of nobody's
        for block_chain in newcomers:
            assert await customer.take(block_chain) == ["host"] * BATCH
        assert await customer.take(hashes) == ["peer"] * len(hashes)

        await use_every_other_slot(scene, customer)  # drives them out
        order.write_text("SIGKILL")
        await ends_short(customer, hashes, [])
        await until_metric(scene, QUARANTINED, 0)
        await asyncio.to_thread(scene.processes["store-0"].join, 10)  # its sockets are gone before it is
        assert not scene.processes["store-0"].is_alive()
        assert await scene.metric("store-1", "epdserve_store_broken_parts") == 0
        client = await scene.client("store-1")
        assert set(await offload(client, reader.offer(chain("z", BATCH)))) == {"taken"}
        assert await customer.take(chain("z", BATCH)) == ["host"] * BATCH
