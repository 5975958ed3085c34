"""A conversation over a whole server: the next turn begins where the last one ended, answer included."""

from typing import Any

import pytest
from support.stack import Stack

BLOCK_TOKENS = 32
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def ask(stack: Stack, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = stack.body("", messages=messages, receipt=True, **{"max_tokens": 40, **fields})
    response = stack.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def cached(answer: dict[str, Any]) -> int:
    """Tokens of the prompt that were found, wherever."""
    tokens = answer["epdserve"]["tokens"]
    found = sum(tokens[source] for source in ("device", "tail", "host", "ssd", "peer"))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == found
    assert found + tokens["computed"] == tokens["prompt"]
    return found


@pytest.mark.parametrize("thinking", ["disabled", "enabled"])
def test_the_next_turn_hits_the_answer(stack: Stack, thinking: str) -> None:
    """Tools are declared, so that reasoning is rendered again. Texts that are not UTF-8 cannot come back: five tries."""
    hits = []
    for number in range(5):
        history = [{"role": "user", "content": f"Tell me a story about the number {number}. " * 4}]
        fields = {"thinking": {"type": thinking}, "tools": [TOOL]}
        first = ask(stack, history, **fields)
        message = first["choices"][0]["message"]
        said = {key: message[key] for key in ("content", "reasoning_content") if message.get(key)}
        if not said or any("\ufffd" in text for text in said.values()) or message.get("tool_calls"):
            continue
        history += [{"role": "assistant", **said}, {"role": "user", "content": "And then?"}]
        second = ask(stack, history, **fields)
        whole = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
        hits.append(cached(second) - whole)
    # All but the token drawn last, or all but an open block where the tail was lost
    assert max(hits) >= -BLOCK_TOKENS


def test_reasoning_that_is_dropped_costs_no_more_than_itself(stack: Stack) -> None:
    """Without tools the next turn renders no reasoning: it goes on from the tail before the thinking marker."""
    history = [{"role": "user", "content": "Tell me a long story about the sea. " * 6}]
    fields = {"thinking": {"type": "enabled"}}
    first = ask(stack, history, **fields)
    history += [{"role": "assistant", "content": "No."}, {"role": "user", "content": "Why not?"}]
    second = ask(stack, history, **fields)
    assert second["epdserve"]["tokens"]["replayed_rows"] == 0
    assert cached(second) == first["usage"]["prompt_tokens"] - 1
