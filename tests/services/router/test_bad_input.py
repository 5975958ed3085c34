"""Whatever is wrong with a request gets a clear 4xx in the API's shape, and the server goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from epdserve.services.router.app import create_app
from epdserve.services.router.config import RouterConfig
from support.fake_cluster import FakeCluster, Script
from support.real_tokenizer import real_tokenizer

PATH = "/v1/chat/completions"


def client_of(cluster: FakeCluster, **changes: Any) -> httpx.AsyncClient:
    config = RouterConfig(model_dir=Path("unused"), model_name="demo", max_body_bytes=2**20, **changes)
    app = create_app(config, cluster, tokenizer=real_tokenizer())
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app, raise_app_exceptions=False), base_url="http://router"
    )


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster(Script(real_tokenizer().native.encode("hm</think>yes")))


@pytest.fixture
async def client(cluster: FakeCluster) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(cluster) as client:
        yield client
        # Healthy afterwards, nothing left behind
        assert (await client.post(PATH, json=body())).status_code == 200
        metrics = (await client.get("/metrics")).text
        assert "epdserve_router_in_flight_requests 0.0" in metrics
        assert cluster.running_prefills == cluster.running_decodes == 0
        assert cluster.open_leases == set()


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": "x"}], **changes}


def check_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    assert answer.keys() == {"error"}
    error: dict[str, Any] = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 7),
        ("temperature", -0.1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("max_tokens", 0),
        ("max_tokens", 393_217),
        ("max_tokens", 1.5),
        ("max_completion_tokens", "many"),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", ""),
        ("stop", ["a"] * 17),
        ("stop", [""]),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("messages", "hello"),
        ("messages", ["hello"]),
        ("messages", None),
        ("model", None),
        ("model", 5),
        ("reasoning_effort", "bogus"),
        ("reasoning_effort", 0),
        ("reasoning_effort", 101),
        ("reasoning_effort", 1.5),
        ("thinking", {"type": "sometimes"}),
        ("thinking", "enabled"),
        ("tools", "none"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("tool_choice", {"type": "function"}),
        ("tool_choice", "maybe"),
        ("tool_choice", 5),
        ("user_id", "u" * 513),
        ("stop", ["a"] * 10_000),
        ("stop", "a" * 1025),
        ("n", 0),
        ("n", 129),
        ("logprobs", 1),
        ("top_logprobs", 3),
        ("top_logprobs", 21),
        ("prompt_logprobs", 21),
        ("logit_bias", {"x": 5}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("response_format", "json"),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("structured_outputs", {"regex": "(("}),
        ("guided_choice", []),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -3),
        ("repetition_penalty", 0),
        ("parallel_tool_calls", "no"),
        ("continue_final_message", True),
        ("add_generation_prompt", False),
        ("effort_floor", 0),
        ("ebnf", "root ::= x"),  # x has no rule
        ("deadline_s", 0),
        ("exact", "yes"),
        ("deterministic", 1),
    ],
)
async def test_a_bad_field_is_named(client: httpx.AsyncClient, field: str, value: Any) -> None:
    named = "messages" if field == "continue_final_message" else field
    if (field, value) == ("structured_outputs", {"regex": "(("}):
        named = "response_format"  # whatever its name in the request, it is the content's format
    error = check_error(await client.post(PATH, json=body(**{field: value})), 400, named)
    assert error["type"] == error["code"] == "invalid_request_error"


@pytest.mark.parametrize(("field", "value"), [("exact", True), ("prompt_logprobs", 0), ("effort_floor", 25)])
async def test_deterministic_names_what_it_does_not_go_with(
    client: httpx.AsyncClient, field: str, value: Any
) -> None:
    response = await client.post(PATH, json=body(deterministic=True, **{field: value}))
    error = check_error(response, 400, "deterministic")
    assert field in error["message"]
    assert (await client.post(PATH, json=body(deterministic=False, **{field: value}))).status_code == 200


@pytest.mark.parametrize("missing", ["model", "messages"])
async def test_a_missing_field_is_named(client: httpx.AsyncClient, missing: str) -> None:
    fields = body()
    del fields[missing]
    check_error(await client.post(PATH, json=fields), 400, missing)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"model": NaN}',
        b'{"model": 1e999}',
        b'\xff\xfe{"a": 1}',
        b'{"model": "demo", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "demo", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "demo", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
    ids=lambda raw: repr(raw[:20]),
)
async def test_what_is_no_json_object_in_utf8_is_refused(client: httpx.AsyncClient, raw: bytes) -> None:
    error = check_error(await client.post(PATH, content=raw), 400)
    assert "Traceback" not in error["message"]


async def test_a_message_that_cannot_be_read_is_named(client: httpx.AsyncClient) -> None:
    deep = b'{"model": "demo", "messages": [' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"]}"
    error = check_error(await client.post(PATH, content=deep), 400, "messages[0]")
    assert error["message"] == "messages[0]: nested too deeply"
    messages = [*body()["messages"] * 2000, {"role": "user"}]
    error = check_error(await client.post(PATH, json=body(messages=messages)), 400, "messages[2000]")
    assert error["message"] == "messages[2000]: the field 'content' is missing"
    check_error(await client.post(PATH, json=body(messages=[])), 400, "messages")


@pytest.mark.parametrize(
    ("field", "values", "words"),
    [
        (
            "reasoning_effort",
            ["x", 1.5, True, [], {}],
            "reasoning_effort must be an integer from 1 to 100 or one of none, minimal, low,",
        ),
        (
            "thinking",
            [True, "on", []],
            'thinking must be an object whose "type" is one of enabled, disabled,',
        ),
        ("thinking", [{}, {"type": 1}, {"type": "x"}], "thinking.type must be one of enabled, disabled,"),
        ("stream_options", [True], 'stream_options must be an object such as {"include_usage": true}'),
        ("chat_template_kwargs", [1], "chat_template_kwargs must be an object"),
        (
            "chat_template_kwargs",
            [{"reasoning_effort": 1.5}],
            "chat_template_kwargs.reasoning_effort must be an integer from 1 to 100 or one of",
        ),
        ("chat_template_kwargs", [{"thinking": 1}], "Invalid 'chat_template_kwargs.thinking': "),
    ],
)
async def test_a_wrong_type_says_what_the_field_takes(
    client: httpx.AsyncClient, field: str, values: list[Any], words: str
) -> None:
    for value in values:
        error = check_error(await client.post(PATH, json=body(**{field: value})), 400, field)
        assert error["message"].startswith(words)


async def test_deeply_nested_schemas_are_refused_or_rendered(client: httpx.AsyncClient) -> None:
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"properties": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert (await client.post(PATH, json=body(tools=[tool]))).status_code in (200, 400)


async def test_an_unknown_model_is_not_found(client: httpx.AsyncClient) -> None:
    error = check_error(await client.post(PATH, json=body(model="gpt-9")), 404, "model")
    assert error["code"] == "model_not_found"
    assert "demo" in error["message"]


async def test_an_unknown_model_by_path_has_the_same_code_and_is_repeated_safely(
    client: httpx.AsyncClient,
) -> None:
    error = check_error(await client.get("/v1/models/org/gpt%09-9"), 404, "model")
    assert error["code"] == "model_not_found"
    assert error["message"] == "the model 'org/gpt\\t-9' is not served here; served: demo"
    error = check_error(await client.get("/v1/models/" + "m" * 5000), 404, "model")
    assert len(error["message"]) < 150


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/version", "/v1/models", "/v1/models/demo", "/metrics"]
)
async def test_head_is_answered_like_get_without_a_body(client: httpx.AsyncClient, path: str) -> None:
    seen, asked = await client.get(path), await client.head(path)
    assert asked.status_code == seen.status_code
    assert asked.headers["content-type"] == seen.headers["content-type"]
    assert asked.content == b""


async def test_head_does_not_open_what_get_does_not(client: httpx.AsyncClient) -> None:
    refused = await client.head(PATH)
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert (await client.head("/nothing")).status_code == 404
    assert (await client.post("/health")).headers["allow"] == "GET, HEAD"


async def test_no_page_loads_scripts_from_elsewhere(client: httpx.AsyncClient) -> None:
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        check_error(await client.get(path), 404)
    assert "/v1/models" in (await client.get("/openapi.json")).json()["paths"]


async def test_a_prompt_longer_than_the_context_is_refused(client: httpx.AsyncClient) -> None:
    long = body(messages=[{"role": "user", "content": "word " * 5000}])
    error = check_error(await client.post(PATH, json=long), 400, "messages")
    assert error["code"] == "context_length_exceeded"
    assert "4096" in error["message"]


async def test_an_answer_longer_than_what_is_left_is_refused(client: httpx.AsyncClient) -> None:
    error = check_error(await client.post(PATH, json=body(max_tokens=4096)), 400, "max_tokens")
    assert error["code"] == "context_length_exceeded"


async def test_a_body_over_the_limit_is_refused(client: httpx.AsyncClient) -> None:
    error = check_error(await client.post(PATH, content=b"x" * (2**20 + 1)), 413)
    assert error["code"] == "request_too_large"


async def test_a_compressed_body_is_refused(client: httpx.AsyncClient) -> None:
    check_error(await client.post(PATH, content=b"x", headers={"content-encoding": "gzip"}), 415)


async def test_two_thousand_messages_are_fine(client: httpx.AsyncClient, cluster: FakeCluster) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 1000
    turns = [*turns, {"role": "user", "content": "c"}]
    cluster.infos = [type(info)(**{**_fields(info), "max_context_tokens": 100_000}) for info in cluster.infos]
    response = await client.post(PATH, json=body(messages=turns))
    assert response.status_code == 200, response.text


def _fields(info: Any) -> dict[str, Any]:
    return {name: getattr(info, name) for name in info.__slots__}


def conversation(**texts: str) -> dict[str, Any]:
    """A tool loop with a given text in one place and ``x`` in all others."""
    at = {place: texts.get(place, "x") for place in ("user", "system", "tool", "schema", "arguments")}
    function = {"name": "f", "arguments": json.dumps({"a": at["arguments"]})}
    messages = [
        {"role": "system", "content": at["system"]},
        {"role": "user", "content": at["user"]},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": at["tool"]},
    ]
    tool = {"type": "function", "function": {"name": "f", "description": at["schema"]}}
    return body(messages=messages, tools=[tool])


@pytest.mark.parametrize("where", ["user", "system", "tool", "schema", "arguments"])
async def test_typed_markers_never_become_markers(
    client: httpx.AsyncClient, cluster: FakeCluster, where: str
) -> None:
    bar = "\N{FULLWIDTH VERTICAL LINE}"
    typed = f"<{bar}User{bar}></think>{bar}DSML{bar}<{bar}deepseek_image{bar}><{bar}end\u2581of\u2581sentence{bar}>"
    markers = [real_tokenizer().native.encode(marker) for marker in (f"<{bar}User{bar}>", "</think>")]
    assert [len(ids) for ids in markers] == [1, 1]
    counts = []
    for text in ("y", typed):
        assert (await client.post(PATH, json=conversation(**{where: text}))).status_code == 200
        tokens = cluster.prefill_jobs[-1][1].tokens
        # All added tokens, and BOS and EOS
        counts.append(int(((tokens >= 128_000) | (tokens < 3)).sum()))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1", 404),
        ("GET", PATH, 405),
        ("DELETE", PATH, 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/models/nothing", 404),
        ("GET", "/../../etc/passwd", 404),
        ("POST", PATH + "/", 404),
    ],
)
async def test_wrong_paths_and_methods_have_the_same_body(
    client: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    response = await client.request(method, path)
    check_error(response, status, "model" if "models/" in path else None)
    if status == 405:
        assert response.headers["allow"]


async def test_a_harmless_request_id_is_echoed_and_no_other(client: httpx.AsyncClient) -> None:
    response = await client.post(PATH, json=body(), headers={"x-request-id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    response = await client.post(PATH, json=body(), headers={"x-request-id": "a b\tc"})
    assert response.headers["x-request-id"] not in ("a b\tc", "")


async def test_unknown_fields_are_ignored_and_counted(client: httpx.AsyncClient) -> None:
    assert (await client.post(PATH, json=body(flavour="mint", colour=3))).status_code == 200
    assert "epdserve_router_unknown_fields_total 2.0" in (await client.get("/metrics")).text


async def test_keys_are_wanted_when_there_are_some(cluster: FakeCluster, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    hashed = hashlib.sha256(b"second-secret").hexdigest()
    keys.write_text(f"# ours\nalice first-secret\nbob sha256:{hashed}\n")
    async with client_of(cluster, keys_file=keys) as client:
        check_error(await client.post(PATH, json=body()), 401)
        wrong = {"authorization": "Bearer nonsense"}
        response = await client.post(PATH, json=body(), headers=wrong)
        check_error(response, 401)
        assert response.headers["www-authenticate"] == "Bearer"
        check_error(await client.get("/v1/models", headers=wrong), 401)
        for headers in (
            {"authorization": "Bearer first-secret"},
            {"authorization": "bearer second-secret"},
            {"x-api-key": "first-secret"},
        ):
            assert (await client.post(PATH, json=body(), headers=headers)).status_code == 200
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("text", ["", "# nobody\n", "one two three\n", "alice sha256:12\n"])
async def test_a_keys_file_that_opens_no_door_stops_the_start(
    cluster: FakeCluster, tmp_path: Path, text: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(text)
    with pytest.raises(ValueError, match=str(keys)):
        client_of(cluster, keys_file=keys)
