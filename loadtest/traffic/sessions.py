"""A customer's session: turns that follow one another, each after the answer to the one before and a pause.

Sessions begin at times of their own whatever the server does (open loop); inside one, a turn waits for its answer, as
people and agents do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session.

    Attributes:
        messages: What is said since the last answer; the whole history goes with it.
        max_tokens: Of the answer.
        exact_answer: The answer shall have just so many tokens: the end marker is ignored.
        prompt_tokens: Length that the whole rendered prompt must have, if it is known beforehand.
        think_s: Pause before it, after the last answer.
        leave_after_s: The client leaves so long after it has asked; None = it waits.
        fields: Further fields of the body, in place of the usual ones.
        refusal_expected: A 4xx is the right answer.
    """

    messages: Sequence[Message]
    max_tokens: int
    exact_answer: bool = True
    prompt_tokens: int | None = None
    think_s: float = 0.0
    leave_after_s: float | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    refusal_expected: bool = False


@dataclass(frozen=True, slots=True)
class Session:
    """One customer.

    Attributes:
        at_s: When it begins, from the start of the run.
        kind: Of the workload; figures are told apart by it.
        tenant: Which of the given keys it uses, modulo their number.
    """

    at_s: float
    kind: str
    turns: Sequence[Turn]
    tenant: int = 0


def usual_fields(turn: Turn, *, plain: bool) -> dict[str, Any]:
    """Fields of a body beside model and messages.

    Args:
        plain: Only what every OpenAI-compatible server takes; answers may then be shorter than asked for.
    """
    body: dict[str, Any] = {"temperature": 0, "max_tokens": turn.max_tokens}
    if not plain:
        body["thinking"] = {"type": "disabled"}
        if turn.exact_answer:
            body["ignore_eos"] = True
    return {**body, **turn.fields}


def answered(outcome_content: str, tool_calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The history's messages for an answer: itself, and a result for each of its calls."""
    message: dict[str, Any] = {"role": "assistant", "content": outcome_content}
    if tool_calls:
        message["tool_calls"] = [dict(call) for call in tool_calls]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": '{"status": "done", "lines": 3}'}
        for call in tool_calls
    ]
    return [message, *results]
