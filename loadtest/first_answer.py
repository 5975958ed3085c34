"""``python -m epdserve.loadtest.first_answer``: from ``bash deploy/up.sh`` to an answer, with ``.venv`` in place.

    python -m epdserve.loadtest.first_answer [--rounds 3] [--model FOLDER]

The first round may write the demo model, if it was never written; it is told apart.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Annotated, Final

import httpx
import typer

_GIVE_UP_S: Final = 240.0
_STOP_S: Final = 60.0
_POLL_S: Final = 0.1
_UP: Final = Path(__file__).parent.parent / "deploy" / "up.sh"


def measure(*arguments: str) -> float:
    """Seconds of one start.

    Raises:
        RuntimeError: No answer came.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="epdserve-first-") as folder:
        words = ["bash", str(_UP), "--port", str(port), "--state-dir", f"{folder}/state", *arguments]
        began = time.monotonic()
        with (Path(folder) / "out").open("wb") as sink:
            server = subprocess.Popen(words, stdout=sink, stderr=subprocess.STDOUT)
        try:
            while not _answers(f"http://127.0.0.1:{port}"):
                if server.poll() is not None or time.monotonic() - began > _GIVE_UP_S:
                    raise RuntimeError((Path(folder) / "out").read_text()[-2000:])
                time.sleep(_POLL_S)
            return time.monotonic() - began
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(_STOP_S)


def _answers(url: str) -> bool:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    try:
        model = httpx.get(f"{url}/v1/models", timeout=5, trust_env=False).json()["data"][0]["id"]
        asked = {**body, "model": model}
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60, trust_env=False)
    except httpx.HTTPError:
        return False
    return answer.status_code == httpx.codes.OK


def main(
    rounds: Annotated[int, typer.Option(min=1, help="How many starts.")] = 3,
    model: Annotated[Path | None, typer.Option(help="Checkpoint; the demo model if not given.")] = None,
) -> None:
    """Measure and print."""
    arguments = () if model is None else ("--model", str(model))
    for number in range(rounds):
        print(f"start {number + 1}: {measure(*arguments):.1f} s to the first answer", flush=True)


if __name__ == "__main__":
    typer.run(main)
