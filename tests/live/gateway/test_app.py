"""Routes, and the document that describes them."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from isthmus.live.gateway import GatewaySettings, GatewayTokenizer, app, create_app
from isthmus.live.gateway.http import HttpError, read_body
from isthmus.live.gateway.openapi import _decimals

from .fake import CARD, FakeBackend
from .inprocess import Poster


def test_health(post: Poster, backend: FakeBackend) -> None:
    response = post.get("/health")
    assert (response.status_code, response.content) == (200, b"")
    backend.healthy = False
    response = post.get("/health")
    assert (response.status_code, response.content) == (503, b"")
    assert response.headers["retry-after"] == "1"


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

    with pytest.raises(HttpError):
        asyncio.run(read_body({"headers": [(b"content-length", b"1001")]}, never, 1000))


def test_the_default_limit_is_8_mib(post: Poster) -> None:
    assert post.request("POST", "/v1/completions", content=b" " * (8 * 2**20)).status_code == 400
    assert post.request("POST", "/v1/completions", content=b" " * (8 * 2**20 + 1)).status_code == 413


def test_two_apps_do_not_share_metrics(post: Poster, backend: FakeBackend, tokenizer: GatewayTokenizer) -> None:
    post.chat()
    assert "isthmus_generation_tokens_total 6.0" in post.get("/metrics").text
    other = Poster(create_app(backend, tokenizer))
    assert "isthmus_generation_tokens_total 0.0" in other.get("/metrics").text


REF = "#/components/schemas/"


@pytest.mark.parametrize("largest", [0, 7, 10, 99, 100, 299, 4090, 49151])
def test_numbers_up_to_the_largest(largest: int) -> None:
    pattern = re.compile(f"^0*({_decimals(str(largest))})$")
    for number in {0, 1, largest // 2, largest - 1, largest, largest + 1, largest + 10, largest * 10 + 9} - {
        -1
    }:
        assert bool(pattern.match(str(number))) == (number <= largest), number
        assert bool(pattern.match(f"00{number}")) == (number <= largest), number


def test_all_that_is_served_is_described(post: Poster) -> None:
    document = post.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    for path, methods in document["paths"].items():
        for method in methods:
            url = path.replace("{name}", CARD.name)
            assert post.request(method.upper(), url, json={}).status_code not in (404, 405), path
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/metrics"} <= document["paths"].keys()
    assert post.get("/v1/nothing").status_code == 404


def test_every_reference_leads_somewhere(post: Poster) -> None:
    text = post.get("/openapi.json").text
    schemas = post.get("/openapi.json").json()["components"]["schemas"]
    found = set(re.findall(r'"\$ref":"([^"]+)"', text))
    assert found
    assert {name.removeprefix(REF) for name in found} <= schemas.keys()


def test_bounds_are_the_model_s(post: Poster) -> None:
    properties = post.get("/openapi.json").json()["components"]["schemas"]["ChatRequest"]["properties"]
    assert properties["model"]["enum"] == [CARD.name, None]
    assert properties["max_tokens"]["maximum"] == CARD.max_length
    ids = properties["stop_token_ids"]["anyOf"][0]["items"]
    assert ids["maximum"] == CARD.vocab_size - 1
    assert properties["thinking_token_budget"]["type"] == "null", "what is refused may only be null"


def test_nobody_who_starts_waits_for_it(
    backend: FakeBackend, tokenizer: GatewayTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bytes] = []
    document = app.document

    def noted(*arguments: Any, **fields: Any) -> bytes:
        made.append(document(*arguments, **fields))
        return made[-1]

    monkeypatch.setattr(app, "document", noted)
    post = Poster(app.create_app(backend, tokenizer))
    assert not made
    assert [post.get("/openapi.json").content for _ in range(2)] == made * 2 and len(made) == 1
