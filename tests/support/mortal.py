"""Real worker processes that can be told at which point of their work to die of SIGKILL.

They are forked from a server that has imported everything once, so that another life costs a fraction of a second.
"""

from __future__ import annotations

import asyncio
import functools
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from support.pools import DECODE, PREFILL, Pools, serve_here

# What workers import: the server's children find it there.
PRELOADED = [DECODE, PREFILL, "support.mortal"]
_SETTLE_S = 0.1  # for what was published before to leave the process


@dataclass(frozen=True)
class Doom:
    """When a worker dies.

    Attributes:
        role: Which kind of worker; the first one that comes there takes it, and it takes one only.
        point: ``drawn`` before a step's tokens are published, ``published`` right after, ``mid_step`` in the middle of
            the step that would draw the token, when what came before has been delivered; ``hand_off`` of a prompt.
        token: Number of the output token, for decode workers.
    """

    role: str
    point: str
    token: int = 0


class Reaper:
    """Dooms lie in a folder that all workers look into. Both sides use it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def send(self, *dooms: Doom) -> None:
        """Let these happen, in this order, and nothing that was sent before."""
        for file in self._folder.iterdir():
            file.unlink()
        for number, doom in enumerate(dooms):
            (self._folder / f"{number}").write_text(json.dumps(asdict(doom)))

    def pending(self) -> int:
        return len(list(self._folder.iterdir()))

    def meet(self, role: str, point: str, token: int = 0) -> None:
        """Die here, if that is meant; dooms are taken in order, each by one worker."""
        for file in sorted(self._folder.iterdir()):
            if json.loads(file.read_text()) != asdict(Doom(role, point, token)):
                return
            try:
                file.unlink()
            except FileNotFoundError:  # another worker took it
                return
            os.kill(os.getpid(), signal.SIGKILL)


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class Mortals:
    """Workers of a ``Pools`` in processes of their own."""

    def __init__(self, pools: Pools) -> None:
        self._pools, self._folder = pools, pools.folder / "dooms"
        self.reaper = Reaper(self._folder)
        self._processes: dict[str, ForkServerProcess] = {}
        self._modules: dict[str, tuple[str, dict[str, Any]]] = {}

    async def start(self, worker: str, module: str, **role: Any) -> None:
        """A worker, or its next life."""
        self._modules[worker] = module, role
        before = {info.worker: info.incarnation for info in (await self._pools.registry.list()).workers}
        arguments = (worker, module, self._pools.pool.model_dump(mode="json"), role, str(self._folder))
        process = _context().Process(target=serve_mortal, args=arguments, name=worker, daemon=True)
        await asyncio.to_thread(process.start)
        self._processes[worker] = process
        async with asyncio.timeout(60):
            while True:
                listed = {
                    info.worker: info.incarnation for info in (await self._pools.registry.list()).workers
                }
                if worker in listed and listed[worker] != before.get(worker):
                    return
                assert process.is_alive(), f"{worker} ended with {process.exitcode}"
                await asyncio.sleep(0.02)

    async def revive(self) -> None:
        """Another life for all that have died."""
        dead = [worker for worker, process in self._processes.items() if not process.is_alive()]
        async with asyncio.TaskGroup() as group:
            for worker in dead:
                module, role = self._modules[worker]
                group.create_task(self.start(worker, module, **role))

    def dead(self) -> list[str]:
        """Who has died of SIGKILL since its last start."""
        return [worker for worker, process in self._processes.items() if process.exitcode == -signal.SIGKILL]

    async def expect_deaths(self, count: int) -> None:
        """Wait for this many deaths: the last token may be here before its worker's end is noticed."""
        async with asyncio.timeout(10):
            while len(self.dead()) < count:  # noqa: ASYNC110 - processes end on their own
                await asyncio.sleep(0.02)
        assert len(self.dead()) == count

    async def end(self) -> None:
        """Stop all of them."""
        for process in self._processes.values():
            if process.is_alive():
                process.terminate()
        for process in self._processes.values():
            await asyncio.to_thread(process.join, 15)
            if process.is_alive():
                process.kill()


def serve_mortal(worker: str, module: str, pool: dict[str, Any], role: dict[str, Any], folder: str) -> None:
    """Main function of a worker's process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    reaper = Reaper(Path(folder))
    (_doom_decode if module == DECODE else _doom_prefill)(reaper)
    serve_here(worker, module, pool, role)


def _doom_prefill(reaper: Reaper) -> None:
    from epdserve.services.prefill.worker import PrefillWorker

    hand_over: Callable[..., None] = PrefillWorker._hand_over

    def die_or_hand_over(self: PrefillWorker, *arguments: Any) -> None:
        reaper.meet("prefill", "hand_off")
        hand_over(self, *arguments)

    PrefillWorker._hand_over = die_or_hand_over  # type: ignore[method-assign]


def _doom_decode(reaper: Reaper) -> None:
    from epdserve.model.causal_decoder import CausalDecoder
    from epdserve.services.decode.worker import DecodeWorker

    init, step, forward = DecodeWorker.__init__, DecodeWorker.step, CausalDecoder.forward
    upcoming: list[int] = []  # tokens that the running step would draw

    def watched_init(self: DecodeWorker, *arguments: Any, publish: Any, **more: Any) -> None:
        def die_or_publish(chunks: Any) -> None:
            for chunk in chunks:
                reaper.meet("decode", "drawn", chunk.offset)
            publish(chunks)
            for chunk in chunks:
                reaper.meet("decode", "published", chunk.offset)

        init(self, *arguments, publish=die_or_publish, **more)

    def watched_step(self: DecodeWorker) -> bool:
        upcoming[:] = [task.produced for task in self._tasks.values()]
        return step(self)

    def die_or_go_on(self: CausalDecoder, *arguments: Any) -> Any:
        """The causal encoder has run: the step's KV is half written."""
        for token in upcoming:
            if reaper.pending():
                time.sleep(_SETTLE_S)
                reaper.meet("decode", "mid_step", token)
        return forward(self, *arguments)

    DecodeWorker.__init__ = watched_init  # type: ignore[method-assign]
    DecodeWorker.step = watched_step  # type: ignore[method-assign]
    CausalDecoder.forward = die_or_go_on  # type: ignore[method-assign]
