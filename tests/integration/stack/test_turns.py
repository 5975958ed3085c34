"""A conversation over a whole server: the next turn begins where the last one ended, answer included."""

from typing import Any

from support.stack import Stack

BLOCK_TOKENS = 32


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


def test_the_next_turn_hits_the_answer(stack: Stack) -> None:
    """What an untrained model says does not always come back as text, hence five tries."""
    missed = []
    for number in range(5):
        history = [{"role": "user", "content": f"Tell me a story about the number {number}. " * 4}]
        first = ask(stack, history)
        content = first["choices"][0]["message"]["content"]
        if not content:
            continue
        history += [{"role": "assistant", "content": content}, {"role": "user", "content": "And then?"}]
        whole = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
        missed.append(whole - cached(ask(stack, history)))
    # The token drawn last was not run; where the tail was not worth fetching, the open block is missed, too
    assert min(missed) <= BLOCK_TOKENS


def test_reasoning_that_is_dropped_costs_no_more_than_itself(stack: Stack) -> None:
    """The next turn renders no reasoning: it goes on before the thinking marker, wherever in a block that is."""
    missed = []
    for number in range(4):
        history = [{"role": "user", "content": f"Tell me a long story about the sea {number}. " * 6}]
        first = ask(stack, history, thinking={"type": "enabled"})
        history += [{"role": "assistant", "content": "No."}, {"role": "user", "content": "Why not?"}]
        second = ask(stack, history, thinking={"type": "enabled"})
        missed.append(first["usage"]["prompt_tokens"] - cached(second))
    # The marker itself; a tail is fetched unless the machine is too busy for it to pay
    assert min(missed) == 1
