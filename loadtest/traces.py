"""Requests with the prefixes they share: read from public traces, or made up in their shape.

A trace names each 512-token block of a prompt by a number; equal numbers stand for equal prefixes up to there. So
cache hits can be counted without any text. Public traces are not in this repository: the files that
``read_mooncake`` takes are ``mooncake_conversation.jsonl.gz`` and the like of the Mooncake project's FAST'25 release,
those of ``read_azure`` the LLM inference traces of Azure's public data set (2023).
"""

import csv
import gzip
import heapq
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

BLOCK_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One prompt: when it came, how long it is, and its blocks, the last of which may be part full.

    ``blocks`` is empty and ``answer_tokens`` 0 where a trace does not tell.
    """

    at_s: float
    prompt_tokens: int
    blocks: tuple[int, ...]
    answer_tokens: int = 0


def read_mooncake(path: Path) -> list[TracedRequest]:
    """Requests of a trace in Mooncake's format, in order of time."""
    opened = gzip.open if path.suffix == ".gz" else open
    requests = []
    with opened(path, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            blocks = tuple(row["hash_ids"])
            answer = int(row.get("output_length", 0))
            requests.append(TracedRequest(row["timestamp"] / 1000, row["input_length"], blocks, answer))
    return sorted(requests, key=lambda request: request.at_s)


def read_azure(path: Path) -> list[TracedRequest]:
    """Requests of a trace in the format of Azure's LLM inference traces, in order of time: lengths, no prefixes."""
    opened = gzip.open if path.suffix == ".gz" else open
    requests = []
    with opened(path, "rt", newline="") as lines:
        for row in csv.DictReader(lines):
            # seven digits of a second, one more than the library reads
            at = datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=UTC)
            lengths = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            requests.append(TracedRequest(at.timestamp(), lengths[0], (), lengths[1]))
    return sorted(requests, key=lambda request: request.at_s)


def generate(
    seed: int, *, conversations: int = 600, hours: float = 1.0, mean_turns: float = 6.0
) -> list[TracedRequest]:
    """Conversations that grow turn by turn behind a few shared system prompts.

    Args:
        seed: Equal seeds give equal requests.
        conversations: They begin evenly over the time, by chance.
        hours: How long conversations go on beginning.
        mean_turns: Of a conversation; lengths are geometric.
    """
    dice = random.Random(seed)
    numbers = iter(range(1 << 62))
    heads = [[next(numbers) for _ in range(dice.randint(1, 8))] for _ in range(8)]
    turns: list[tuple[float, int, TracedRequest]] = []
    for conversation in range(conversations):
        for turn in _conversation(dice, numbers, heads, 3600 * hours, mean_turns):
            heapq.heappush(turns, (turn.at_s, conversation, turn))
    return [heapq.heappop(turns)[2] for _ in range(len(turns))]


def _conversation(
    dice: random.Random, numbers: Iterator[int], heads: list[list[int]], until_s: float, mean_turns: float
) -> Iterator[TracedRequest]:
    at_s = dice.random() * until_s
    blocks = list(heads[min(int(dice.paretovariate(1.0)) - 1, len(heads) - 1)])  # few heads are much used
    tokens = len(blocks) * BLOCK_TOKENS
    while True:
        tokens += int(dice.lognormvariate(6.8, 1.2))  # what the user adds: files, tool results
        while len(blocks) * BLOCK_TOKENS < tokens:
            blocks.append(next(numbers))
        yield TracedRequest(at_s, tokens, tuple(blocks))
        if dice.random() < 1 / mean_turns:
            return
        if tokens % BLOCK_TOKENS:
            blocks.pop()  # the answer fills the open block: another name
        tokens += int(dice.lognormvariate(5.5, 0.8))
        at_s += dice.expovariate(1 / 90.0)
