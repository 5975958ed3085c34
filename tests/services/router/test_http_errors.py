"""One table: every error of ours has a name in each protocol, with the status it stands for."""

from __future__ import annotations

import json

import pytest
from epdserve.services.errors import STATUS, Overloaded, ServiceError, Unauthenticated
from epdserve.services.router.anthropic.shape import AnthropicErrors
from epdserve.services.router.http_errors import TABLE, ErrorStyle, error_headers, names_of, status_of

OFFICIAL = {
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
    "timeout_error",
}


@pytest.mark.parametrize("code", STATUS)
def test_every_code_has_a_row_and_its_bodies(code: str) -> None:
    error: ServiceError = STATUS[code].error("words")
    assert code in TABLE
    assert status_of(error) == STATUS[code].http_status
    plain = json.loads(ErrorStyle().body(error, "r"))["error"]
    assert (plain["message"], plain["code"], plain["param"]) == ("words", TABLE[code].code, None)
    theirs = json.loads(AnthropicErrors().body(error, "r"))
    assert theirs["error"]["type"] in OFFICIAL
    assert theirs["request_id"] == "r"


@pytest.mark.parametrize("kind", [key for key in TABLE if isinstance(key, type)])
def test_errors_that_only_http_knows_have_a_status_of_their_own(kind: type[ServiceError]) -> None:
    assert names_of(kind("words")) is TABLE[kind]
    assert 400 <= status_of(kind("words")) < 500


def test_what_has_no_row_is_a_bug_and_says_no_more() -> None:
    class OddError(ServiceError):
        code = "odd"

    assert names_of(OddError("words")) is TABLE["internal"]


def test_events_end_the_stream_as_each_protocol_does() -> None:
    assert ErrorStyle().event(Overloaded("x"), "r").endswith(b"\n\ndata: [DONE]\n\n")
    assert AnthropicErrors().event(Overloaded("x"), "r").startswith(b"event: error\ndata: {")


def test_headers_say_when_to_come_back_and_how_to_come_in() -> None:
    assert error_headers(Overloaded("x", retry_after_s=0.2)) == [(b"retry-after", b"1")]
    assert error_headers(Unauthenticated("x")) == [(b"www-authenticate", b"Bearer")]
