"""Errors: before the first token they are a status, afterwards an event of the stream."""

from __future__ import annotations

import json

import pytest

from isthmus.core.errors import IsthmusError, OverloadedError, ProtocolError, RequestError, UnavailableError

from .fake import FakeBackend, Step, says
from .inprocess import Poster

ERRORS: list[tuple[Exception, int, dict[str, str | None]]] = [
    (
        RequestError("too hot", param="temperature", code="hot"),
        400,
        {"message": "too hot", "type": "invalid_request_error", "param": "temperature", "code": "hot"},
    ),
    (
        OverloadedError("try later", retry_after_s=7),
        429,
        {"message": "try later", "type": "rate_limit_error", "param": None, "code": "overloaded"},
    ),
    (
        UnavailableError("no node"),
        503,
        {"message": "no node", "type": "server_error", "param": None, "code": "unavailable"},
    ),
    (
        ProtocolError("odd frame"),
        502,
        {"message": "odd frame", "type": "server_error", "param": None, "code": None},
    ),
    (
        RuntimeError("secret"),
        500,
        {
            "message": "internal error; the server's log says more",
            "type": "server_error",
            "param": None,
            "code": None,
        },
    ),
]


@pytest.mark.parametrize(("error", "status", "shape"), ERRORS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at_submit", [False, True])
def test_errors_before_the_first_token(
    post: Poster,
    backend: FakeBackend,
    error: Exception,
    status: int,
    shape: dict[str, str | None],
    stream: bool,
    at_submit: bool,
) -> None:
    def script(_: object) -> list[Step]:
        if at_submit:
            raise error
        return [error]

    backend.script = script
    response = post.chat(stream=stream)
    assert response.status_code == status
    assert response.json() == {"error": shape}
    assert response.headers.get("retry-after") == {429: "7", 503: "1"}.get(status)
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(("error", "status", "shape"), ERRORS)
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_errors_after_the_first_token(
    post: Poster,
    backend: FakeBackend,
    error: Exception,
    status: int,
    shape: dict[str, str | None],
    endpoint: str,
) -> None:
    backend.script = lambda _: [*says([97], finish=None), error]
    response = getattr(post, endpoint)(stream=True)
    assert response.status_code == 200
    *_, last, done, rest = response.text.split("\n\n")
    assert json.loads(last.removeprefix("data: ")) == {"error": shape}
    assert (done, rest) == ("data: [DONE]", "")
    assert f'requests_failed_total{{status="{status}"}} 1.0' in post.get("/metrics").text


def test_a_submit_that_fails_takes_the_earlier_ones_back(post: Poster, backend: FakeBackend) -> None:
    def script(job: object) -> list[Step]:
        if len(backend.jobs) == 2:
            raise OverloadedError("full", retry_after_s=1)
        return says([97])

    backend.script = script
    assert post.chat(n=3).status_code == 429
    assert sorted(backend.cancelled) == sorted(job.request for job in backend.jobs)


def test_a_slow_answer_that_fails_is_no_stream(post: Poster, backend: FakeBackend) -> None:
    """The response begins with the first token, not with the request."""
    backend.script = lambda _: [IsthmusError("lost")]
    response = post.complete(stream=True)
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/json"
