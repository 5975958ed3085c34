import json

import httpx
from epdserve.loadtest.client import first_model, stream_chat
from epdserve.loadtest.run import send_all, words_for_tokens


def sse(*events: object) -> bytes:
    lines = [f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events]
    return "".join([": keep-alive\n\n", *lines]).encode()


def delta(finish_reason: str | None = None, **fields: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 300, "completion_tokens": 3},
    "epdserve": {"replayed_rows": 8},
}


def client_answering(status: int, body: bytes) -> httpx.AsyncClient:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "demo"}]})
        assert json.loads(request.content)["stream"] is True
        return httpx.Response(status, content=body)

    return httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server")


async def test_a_stream_is_read_to_its_end() -> None:
    body = sse(
        delta(role="assistant"), delta(reasoning_content="hm"), delta("stop", content="yes"), USAGE, "[DONE]"
    )
    async with client_answering(200, body) as client:
        outcome = await stream_chat(client, {"messages": []})
    assert outcome.ok
    assert outcome.text == "hmyes"
    assert len(outcome.text_at) == 2
    assert (outcome.completion_tokens, outcome.receipt) == (3, {"replayed_rows": 8})
    assert outcome.ttft_s is not None
    assert outcome.ttft_s >= 0
    assert outcome.itl_s is not None


async def test_a_refusal_is_an_outcome() -> None:
    async with client_answering(429, b'{"error": {"message": "full"}}') as client:
        outcome = await stream_chat(client, {})
    assert not outcome.ok
    assert outcome.error is not None
    assert outcome.error.startswith("429")


async def test_an_error_event_is_an_outcome() -> None:
    async with client_answering(
        200, sse(delta(content="a"), {"error": {"message": "lost"}}, "[DONE]")
    ) as client:
        outcome = await stream_chat(client, {})
    assert (outcome.ok, outcome.error) == (False, "lost")


async def test_a_cut_stream_is_no_success() -> None:
    async with client_answering(200, sse(delta(content="a"))) as client:
        outcome = await stream_chat(client, {})
    assert not outcome.ok
    assert outcome.itl_s is None


async def test_all_bodies_are_sent_and_answers_keep_their_order() -> None:
    async with client_answering(200, sse(delta("stop", content="a"), USAGE, "[DONE]")) as client:
        assert await first_model(client) == "demo"
        outcomes = await send_all(client, [{}, {}, {}], [0.0, 0.01, 0.0])
    assert [outcome.ok for outcome in outcomes] == [True] * 3
    assert outcomes[1].sent_at > outcomes[2].sent_at


async def test_a_prompt_is_sized_by_asking_the_server() -> None:
    async with client_answering(200, sse(delta("length", content="a"), USAGE, "[DONE]")) as client:
        assert await words_for_tokens(client, "demo", 3000) == 2000
