"""``python -m epdserve.model.demo.training.efforts URL``: how long a deployment thinks at each effort, and how rightly.

The same held-out questions about six facts are asked at every effort, through the chat endpoint. An answer is right by
its content alone, whatever was thought before it.
"""

from __future__ import annotations

import argparse
import json
import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import mean
from typing import Any, Final

from epdserve.model.demo.training import facts
from epdserve.model.demo.training.evaluation import interval
from epdserve.model.demo.training.thought import EFFORTS

_FACTS: Final = 6
_MOST_TOKENS: Final = 400
_DEADLINE_S: Final = 120.0
_AT_ONCE: Final = 4  # questions under way together


@dataclass(frozen=True, slots=True)
class Thought:
    """What one question took.

    Attributes:
        reasoning_tokens: As the usage of the answer counts them.
        right: The content is the right answer.
    """

    reasoning_tokens: int
    right: bool


def question(number: int) -> tuple[str, str]:
    """What is asked, facts included, and the right answer; from seeds that training never uses."""
    draw = random.Random(f"held out effort {number}")
    known = facts.Facts(draw, _FACTS)
    asked = known.ask(draw, in_one_word=False)
    return " ".join(known.sentences()) + "\n\n" + asked.question, asked.answer


def think(url: str, model: str, number: int, effort: int) -> Thought:
    """Ask one question at an effort from 1 to 100.

    Raises:
        OSError: The deployment does not answer, or with an error.
    """
    text, right = question(number)
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": _MOST_TOKENS,
        "temperature": 0,
        "thinking": {"type": "enabled"},
        "reasoning_effort": effort,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_DEADLINE_S) as answered:
        answer = json.load(answered)
    spent = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return Thought(spent, answer["choices"][0]["message"]["content"] == right)


def main() -> None:
    """Print a Markdown row for every effort."""
    parser = argparse.ArgumentParser(
        prog="python -m epdserve.model.demo.training.efforts", description=__doc__
    )
    parser.add_argument("url", help="of the router, without a path")
    parser.add_argument("--model", default="demo", help="name under which it serves the demo model")
    parser.add_argument("--efforts", nargs="+", type=int, default=list(EFFORTS))
    parser.add_argument("--count", type=int, default=50)
    options = parser.parse_args()
    print("| effort | tokens of reasoning, mean | right | 95 % interval |\n|---|---|---|---|")
    for effort in options.efforts:

        def at(number: int, effort: int = effort) -> Thought:
            return think(options.url, options.model, number, effort)

        with ThreadPoolExecutor(_AT_ONCE) as threads:
            thoughts = list(threads.map(at, range(options.count)))
        right = sum(thought.right for thought in thoughts)
        low, high = interval(right, options.count)
        length = mean(thought.reasoning_tokens for thought in thoughts)
        print(
            f"| {effort} | {length:.1f} | {right / options.count:.2f} of {options.count} | {low:.2f}-{high:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
