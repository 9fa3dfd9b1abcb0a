from __future__ import annotations

import asyncio

import pytest

from isthmus.live.gateway import GatewaySettings, GatewayTokenizer, create_app
from isthmus.live.gateway.http import read_body
from isthmus.live.gateway.problems import BodyTooLargeError

from .fake import FakeBackend
from .inprocess import Poster

MODEL = {
    "id": "acme/tiny",
    "object": "model",
    "created": 1_700_000_000,
    "owned_by": "isthmus",
    "max_model_len": 256,
    "root": "acme/tiny",
    "parent": None,
}


def test_models(post: Poster) -> None:
    assert post.get("/v1/models").json() == {"object": "list", "data": [MODEL]}
    assert post.get("/v1/models/acme/tiny").json() == MODEL


def test_another_model(post: Poster) -> None:
    response = post.get("/v1/models/other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_health(post: Poster, backend: FakeBackend) -> None:
    response = post.get("/health")
    assert (response.status_code, response.content) == (200, b"")
    backend.healthy = False
    response = post.get("/health")
    assert (response.status_code, response.content) == (503, b"")
    assert response.headers["retry-after"] == "1"


def test_unknown_routes(post: Poster) -> None:
    response = post.get("/v2/nothing")
    assert response.status_code == 404
    assert response.json()["error"] == {
        "message": "no such route: /v2/nothing",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/completions"), ("POST", "/health"), ("PUT", "/metrics")]
)
def test_wrong_methods(post: Poster, method: str, path: str) -> None:
    response = post.request(method, path)
    assert response.status_code == 405
    assert response.json()["error"]["message"] == f"{method} is not allowed on {path}"
    assert ("POST" if method == "GET" else "GET") in response.headers["allow"]


@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies(backend: FakeBackend, tokenizer: GatewayTokenizer, chunked: bool) -> None:
    async def chunks():  # type: ignore[no-untyped-def]
        for _ in range(3):
            yield b"x" * 500

    post = Poster(create_app(backend, tokenizer, GatewaySettings(max_body_bytes=1000)))
    content = chunks() if chunked else b"x" * 1500
    response = post.request("POST", "/v1/completions", content=content)
    assert response.status_code == 413
    assert "larger than 1000 bytes" in response.json()["error"]["message"]


def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    async def never() -> dict[str, object]:
        raise AssertionError("it was read")

    with pytest.raises(BodyTooLargeError):
        asyncio.run(read_body({"headers": [(b"content-length", b"1001")]}, never, 1000))


def test_the_default_limit_is_8_mib(post: Poster) -> None:
    assert post.request("POST", "/v1/completions", content=b" " * (8 * 2**20)).status_code == 400
    assert post.request("POST", "/v1/completions", content=b" " * (8 * 2**20 + 1)).status_code == 413


def test_two_apps_do_not_share_metrics(post: Poster, backend: FakeBackend, tokenizer: GatewayTokenizer) -> None:
    post.chat()
    assert "isthmus_generation_tokens_total 6.0" in post.get("/metrics").text
    other = Poster(create_app(backend, tokenizer))
    assert "isthmus_generation_tokens_total 0.0" in other.get("/metrics").text
