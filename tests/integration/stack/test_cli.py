"""The command line against real processes."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.stack import Stack, still_running

COMMAND = (sys.executable, "-P", "-m", "epdserve.services.cli")


def run(*arguments: str, module: str = "epdserve.services.cli", status: int = 0) -> str:
    """What a command prints on its standard output."""
    command = [sys.executable, "-P", "-m", module, *arguments]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr


def test_what_up_prints_can_be_pasted(stack: Stack) -> None:
    printed = stack.printed().replace('"max_tokens": 256', '"max_tokens": 4').replace("=256", "=4")
    assert f"epdserve is ready at {stack.base_url} " in printed
    before, snippet = printed.split("\n  from openai", 1)
    command, url, *arguments = shlex.split(before[before.index("  curl ") :])
    assert (command, arguments[::2]) == ("curl", ["-H", "-d"])
    answer = httpx.post(url, content=arguments[3], headers=dict([arguments[1].split(": ")]), timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 4
    program = textwrap.dedent("  from openai" + snippet.partition("\n\n")[0])
    run = [sys.executable, "-P", "-c", program]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("ChatCompletionMessage("), done.stderr


def test_chat_answers_with_a_receipt(stack: Stack) -> None:
    out = run("chat", "Tell me a story.", "--url", stack.base_url, "--max-tokens", "16", "--temperature", "0")
    assert "answer " in out
    assert "tokens/s" in out
    assert "workers.prefill prefill-0" in out


def test_chat_shows_the_server_s_refusal(stack: Stack) -> None:
    err = run("chat", "hello", "--url", stack.base_url, "--model", "no-such-model", status=1)
    assert err.startswith("epdserve: the server answered 404")


def test_one_process_writes_the_same_text(stack: Stack, tmp_path: Path) -> None:
    # Shorter and longer than a block, the window, the top-k and the candidate pool of the demo model. No other test
    # begins a prompt like these: a prefix hit on one side only would be replayed on one side only.
    texts = [word * 7 for word in ("river ", "The quick brown fox. " * 5, "Rain fell on the hills. " * 20)]
    bodies = [stack.body(text, max_tokens=24, ignore_eos=True) for text in texts]
    (tmp_path / "requests.json").write_text(json.dumps(bodies))
    out = run(
        "generate", "--json", "--requests", str(tmp_path / "requests.json"), "--model", str(stack.model_dir)
    )
    alone = [answer["text"] for answer in json.loads(out)["rounds"][0]]
    served = [stack.http.post("/v1/chat/completions", json=body).json() for body in bodies]
    assert [answer["choices"][0]["message"]["content"] or "" for answer in served] == alone


def test_every_workload_runs_and_has_the_lengths_asked_for(stack: Stack) -> None:
    sizes = ("--turns", "2", "--think", "0", "--prompt-tokens", "40", "--max-tokens", "8")
    load = ("--workload", "mixed", "--requests", "7", "--rate", "0", *sizes)
    told = run("--url", stack.base_url, *load, "--json", "-", module="epdserve.loadtest")
    figures: dict[str, Any] = json.loads(told)
    assert (figures["requests"], figures["unexpected"], figures["wrong_lengths"]) == (10, 0, 0)
    assert figures["endings"]["ok"] >= 9  # one of them may leave
    assert figures["ttft_ms"]["p50"] > 0


def test_a_port_that_the_server_holds_is_refused(stack: Stack, tmp_path: Path) -> None:
    port = str(httpx.URL(stack.base_url).port)
    err = run(
        "up", "--port", port, "--model", str(stack.model_dir), "--state-dir", str(tmp_path / "s"), status=1
    )
    assert "--port" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_worker_comes_back(stack: Stack, role: str) -> None:
    name = stack.kill_worker(role)
    # Requests wait for the replacement instead of failing.
    answer = stack.chat("Are you there?", max_tokens=4)
    assert answer.status_code == httpx.codes.OK, answer.text
    stack.wait_until(stack.ready)
    stack.wait_until(lambda: all(worker["running"] for worker in stack.state()["workers"]))
    assert next(w["lives"] for w in stack.state()["workers"] if w["worker"] == name) >= 2


def test_a_killed_registry_comes_back_and_clients_see_nothing(stack: Stack) -> None:
    before = stack.state()["processes"]["registry"]
    os.kill(before, signal.SIGKILL)
    answer = stack.chat("Is anybody there?", max_tokens=4)
    assert answer.status_code == httpx.codes.OK, answer.text
    stack.wait_until(lambda: stack.state()["processes"]["registry"] != before)
    time.sleep(2.0)  # longer than heartbeats and refreshes need to notice
    assert stack.ready()
    assert stack.chat("And now?", max_tokens=4).status_code == httpx.codes.OK


def test_ctrl_c_in_the_middle_of_the_start_leaves_nothing(stack: Stack, tmp_path: Path) -> None:
    arguments = ("up", "--port", "0", "--model", str(stack.model_dir), "--state-dir", str(tmp_path / "state"))
    process = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert any("Ray" in line for line in lines)
    time.sleep(1.0)
    children = still_running(descendants(process.pid))
    scratch = scratch_folders(children)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    process.stderr.close()
    assert children
    stack.wait_until(lambda: not still_running(children))
    assert scratch
    assert not [folder for folder in scratch if folder.exists()]


def scratch_folders(pids: Iterable[int]) -> set[Path]:
    """The folders that these processes were given, and not those of whatever else runs on this machine."""
    found = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):
            words = Path(f"/proc/{pid}/cmdline").read_text()
            found |= {Path(one) for one in re.findall(rf"{tempfile.gettempdir()}/epdserve-\w+", words)}
    return found


def descendants(pid: int) -> list[int]:
    """Process ids of all children and their children."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").glob("*/children")
        for child in task.read_text().split()
    ]
    return children + [below for child in children for below in descendants(child)]
