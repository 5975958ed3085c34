"""``python -m epdserve.model.demo.training.served URL``: the evaluation's cases through a running deployment.

A prompt goes as token ids to the completions endpoint, greedy unless told otherwise, so that prefix hits, replay and
the hand-off take part as they fall. The answer must be the right one, to the last character.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from epdserve.model.demo.training.cases import Case, Cases
from epdserve.model.demo.training.evaluation import interval
from epdserve.model.demo.training.vocabulary import Vocabulary

_SLACK_TOKENS: Final = 8  # beyond the right answer, so that one that goes on is seen to go on
_DEADLINE_S: Final = 120.0
_AT_ONCE: Final = 4  # questions under way together


def ask(url: str, model: str, case: Case, temperature: float = 0.0, seed: int = 0) -> str:
    """The text that a deployment gives for a case, greedy or drawn at a temperature.

    Raises:
        OSError: It does not answer, or with an error.
    """
    body = {
        "model": model,
        "prompt": list(case.prompt),
        "max_tokens": len(case.answer) + _SLACK_TOKENS,
        "temperature": temperature,
        "seed": seed,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_DEADLINE_S) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text


def share_right(
    url: str, model: str, cases: Cases, name: str, count: int, temperature: float = 0.0
) -> tuple[int, int]:
    """(right answers, cases) of the first ``count`` cases of a name.

    Raises:
        OSError: The deployment does not answer, or with an error.
    """

    def is_right(number: int) -> bool:
        case = cases.draw(name, number)
        return ask(url, model, case, temperature, number) == cases.text(case.answer[:-1])

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return sum(threads.map(is_right, range(count))), count


def main() -> None:
    """Print a Markdown row for every name."""
    parser = argparse.ArgumentParser(
        prog="python -m epdserve.model.demo.training.served", description=__doc__
    )
    parser.add_argument("url", help="of the router, without a path")
    parser.add_argument("--model", default="demo", help="name under which it serves the demo model")
    parser.add_argument(
        "--cases", nargs="+", default=["copy", "recall", "recall-512", "tool", "json", "greet"]
    )
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    cases = Cases(Vocabulary())
    print("| case | right | 95 % interval |\n|---|---|---|")
    for name in options.cases:
        right, _ = share_right(options.url, options.model, cases, name, options.count, options.temperature)
        low, high = interval(right, options.count)
        print(
            f"| {name} | {right / options.count:.2f} of {options.count} | {low:.2f}-{high:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
