"""An event loop in a thread of its own, for a process whose main thread is not one (one process, tests)."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs an asyncio loop until ``stop``. Thread-safe."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
        """Run a coroutine on the loop and wait for it.

        Raises:
            TimeoutError: It took longer; it was told to stop.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the loop; tasks still on it are lost."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5.0)
        self.loop.close()
