"""Headless Chromium over its debugging pipe: go somewhere, evaluate, click, take a picture. No driver is needed."""

from __future__ import annotations

import base64
import itertools
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Browser:
    """One page."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out, self._in = os.fdopen(to_browser, "wb"), os.fdopen(from_browser, "rb")
        self._numbers = itertools.count(1)
        self._session = ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def go(self, url: str) -> None:
        """Open an address; what loads it may still run."""
        self.call("Page.navigate", url=url)

    def look(self, expression: str) -> Any:
        """The value of an expression in the page."""
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def wait(self, expression: str, *, within_s: float = 15.0) -> None:
        """Until an expression is true."""
        give_up_at = time.monotonic() + within_s
        while not self.look(expression):
            assert time.monotonic() < give_up_at, f"not within {within_s} s: {expression}"
            time.sleep(0.05)

    def screen(self, width: int, height: int, *, phone: bool = False, dark: bool = False) -> None:
        """Be such a screen."""
        scale = 2 if phone else 1
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        """A PNG of what is seen."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def complaints(self) -> list[str]:
        """What the page did wrong so far: errors, and things its policy forbids."""
        self.call("Runtime.evaluate", expression="1")  # what was said before it is read with it
        logs = [event["params"]["entry"] for event in self.events if event.get("method") == "Log.entryAdded"]
        thrown = [event for event in self.events if event.get("method") == "Runtime.exceptionThrown"]
        return [entry["text"] for entry in logs if entry["level"] == "error"] + [str(one) for one in thrown]

    def close(self) -> None:
        """End the pipe; the browser ends with it."""
        self._out.close()
        self._in.close()

    def _read(self) -> dict[str, Any]:
        parts = bytearray()
        while (byte := self._in.read(1)) != b"\0":
            assert byte, "the browser ended"
            parts += byte
        message: dict[str, Any] = json.loads(parts)
        return message


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """One with its profile in ``folder``, gone when the block ends."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()

    def place() -> None:  # Chromium reads from descriptor 3 and writes to 4
        held = os.dup(theirs_in), os.dup(theirs_out)
        os.dup2(held[0], 3)
        os.dup2(held[1], 4)

    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += ["--remote-debugging-pipe", f"--user-data-dir={folder}"]
    process = subprocess.Popen(
        ["chromium", *flags], stderr=subprocess.DEVNULL, preexec_fn=place, close_fds=False
    )
    os.close(theirs_in)
    os.close(theirs_out)
    page = None
    try:
        page = Browser(ours_out, ours_in)
        yield page
    finally:
        if page is not None:
            page.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
