"""Put and get of the same blocks by other projects' stores, in an interpreter that has them and nothing of ours:

    PYTHON loadtest/kv_bench/peer_stores.py mooncake|lmcache        prints figures in GB/s as JSON

See README.md for the environment that PYTHON comes from. Both run in one process over host memory, as our rows of the
same table do; neither verifies what it hands out.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

BLOCK_BYTES = 114_688  # as in row.py, which is not to be imported here
COUNT, ROUNDS = 256, 9


def quartile_s(works: dict[str, Callable[[int], object]]) -> dict[str, float]:
    """Seconds of each work, in turns; the lower quartile, without the first round."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(ROUNDS + 1):
        for name, work in works.items():
            began = time.perf_counter()
            work(number)
            if number:
                seconds[name].append(time.perf_counter() - began)
    return {name: sorted(taken)[(len(taken) - 1) // 4] for name, taken in seconds.items()}


def mooncake() -> dict[str, float]:
    """``MooncakeDistributedStore`` over TCP to its own segment, batches out of and into registered memory."""
    import mooncake as package
    from mooncake.store import MooncakeDistributedStore

    ports = [_free_port(), _free_port()]
    master = subprocess.Popen(
        [
            str(Path(package.__file__).parent / "mooncake_master"),
            f"--rpc_port={ports[0]}",
            f"--metrics_port={ports[1]}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _await_port(ports[0])
        store = MooncakeDistributedStore()
        at = f"127.0.0.1:{ports[0]}"
        if store.setup("127.0.0.1", "P2PHANDSHAKE", 1 << 30, 128 << 20, "tcp", "", at) != 0:
            raise RuntimeError("setup was refused")
        source, target = _blocks()
        for memory in (source, target):
            store.register_buffer(memory.ctypes.data, memory.nbytes)
        places = [[row.ctypes.data for row in memory] for memory in (source, target)]
        sizes = [BLOCK_BYTES] * COUNT

        def put(number: int) -> None:
            if any(store.batch_put_from(_names(number), places[0], sizes)):
                raise RuntimeError("a put failed")

        def get(number: int) -> None:
            if set(store.batch_get_into(_names(number), places[1], sizes)) != {BLOCK_BYTES}:
                raise RuntimeError("a get failed")

        def clear(number: int) -> None:
            for name in _names(number):
                store.remove(name)

        seconds = quartile_s(
            {"put": put, "get": get, "clear": clear, "memcpy": lambda _: np.copyto(target, source)}
        )
    finally:
        master.kill()
        master.wait()
    return _figures(seconds)


def lmcache() -> dict[str, float]:
    """LMCache's ``LocalCPUBackend``: allocate, copy in, put; get, copy out."""
    import torch
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_management import MemoryFormat
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

    torch.set_num_threads(1)
    config = LMCacheEngineConfig.from_defaults(local_cpu=True, max_local_cpu_size=0.25, chunk_size=256)
    metadata = LMCacheMetadata(
        model_name="m",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.uint8,
        kv_shape=(1, 1, 256, 1, BLOCK_BYTES // 256),
    )
    backend = LocalCPUBackend(config, metadata, dst_device="cpu")
    source, target = (torch.from_numpy(memory) for memory in _blocks())
    shape = torch.Size([BLOCK_BYTES])

    def keys(number: int) -> list[Any]:
        return [CacheEngineKey("m", 1, 0, number * COUNT + block, torch.uint8) for block in range(COUNT)]

    def put(number: int) -> None:
        for block, key in enumerate(keys(number)):
            place = backend.allocate(shape, torch.uint8, MemoryFormat.KV_2LTD)
            place.tensor.copy_(source[block])
            backend.submit_put_task(key, place)
            place.ref_count_down()

    def get(number: int) -> None:
        for block, key in enumerate(keys(number)):
            place = backend.get_blocking(key)
            target[block].copy_(place.tensor)
            place.ref_count_down()

    def clear(number: int) -> None:
        for key in keys(number):
            backend.remove(key)

    def memcpy(_: int) -> None:
        for block in range(COUNT):
            target[block].copy_(source[block])

    return _figures(quartile_s({"put": put, "get": get, "clear": clear, "memcpy": memcpy}))


def _figures(seconds: dict[str, float]) -> dict[str, float]:
    return {name: COUNT * BLOCK_BYTES / taken / 1e9 for name, taken in seconds.items() if name != "clear"}


def _blocks() -> tuple[Any, Any]:
    source = np.random.default_rng(0).integers(0, 256, (COUNT, BLOCK_BYTES), np.uint8)
    return source, np.zeros_like(source)


def _names(number: int) -> list[str]:
    return [f"{number}-{block}" for block in range(COUNT)]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _await_port(port: int) -> None:
    give_up_at = time.monotonic() + 20
    while time.monotonic() < give_up_at:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError("the master does not listen")


if __name__ == "__main__":
    print(json.dumps({"mooncake": mooncake, "lmcache": lmcache}[sys.argv[1]]()))
