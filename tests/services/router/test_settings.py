"""Settings and fields that no other test turns: each changes what the engine gets or the client sees."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.conformance import OFF, TOOL, USER, bench, spoken
from support.fake_cluster import Script
from support.real_tokenizer import real_tokenizer

REMINDER_ID = 128_828


def script() -> Script:
    return Script(spoken("</think>x"))


async def test_other_names_of_the_model_are_served_and_listed() -> None:
    async with bench(script(), model_aliases=("flash", "deepseek-chat")) as router:
        answer = (await router.post(model="flash")).json()
        assert answer["model"] == "flash"
        names = [one["id"] for one in (await router.http.get("/v1/models")).json()["data"]]
    assert names == ["demo", "flash", "deepseek-chat"]


async def test_the_default_effort_is_that_of_the_settings() -> None:
    async with bench(script(), default_effort=60) as router:
        granted = [
            (await router.post(**fields)).headers.get("x-effort-granted")
            for fields in ({}, {"reasoning_effort": "max"}, OFF)
        ]
        ids = router.cluster.prefill_jobs[0][1].tokens
    assert granted == ["60", "100", None]
    (sixty,) = real_tokenizer().plain_ids("60")
    assert sixty in ids[:16]


async def test_the_context_is_no_longer_than_the_setting() -> None:
    async with bench(script(), max_context_tokens=64) as router:
        assert (await router.http.get("/v1/models/demo")).json()["max_model_len"] == 64
        fits = await router.post(max_tokens=8)
        long: dict[str, Any] = {"messages": [{"role": "user", "content": "word " * 80}]}
        refused = [await router.post(**long), await router.post(max_tokens=63)]
    assert fits.status_code == 200
    assert [answer.status_code for answer in refused] == [400, 400]
    assert {answer.json()["error"]["code"] for answer in refused} == {"context_length_exceeded"}


async def test_a_reminder_has_its_marker() -> None:
    async with bench(script()) as router:
        reminder = {"role": "latest_reminder", "content": "today is Monday"}
        assert (await router.post(messages=[*USER, reminder])).status_code == 200
        ids = router.cluster.prefill_jobs[0][1].tokens
    assert np.count_nonzero(ids == REMINDER_ID) == 1


async def test_of_allowed_tools_the_others_cannot_be_called() -> None:
    other = {"type": "function", "function": {**TOOL["function"], "name": "g"}}  # type: ignore[dict-item]
    asked = {
        "tools": [TOOL, other],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "g"}}],
            },
        },
    }
    async with bench(script()) as router:
        response = await router.post(**asked, **OFF)
        assert response.status_code == 200, response.text
        grammar = router.cluster.decode_jobs[0][1].grammar
    assert grammar is not None
    assert '"g"' in grammar.text or 'name=\\"g' in grammar.text
    assert 'name=\\"f' not in grammar.text
