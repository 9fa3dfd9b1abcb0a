"""Routes, and the document that describes them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import msgspec
import pytest

from isthmus.core.types import FinishReason, Generated
from isthmus.live.gateway.openapi import _decimals

from .fake import CARD, FakeBackend
from .inprocess import Poster, Served
from .test_headers import ask


def test_health(post: Poster, backend: FakeBackend) -> None:
    response = post.get("/health")
    assert (response.status_code, response.content) == (200, b"")
    backend.healthy = False
    response = post.get("/health")
    assert (response.status_code, response.content) == (503, b"")
    assert response.headers["retry-after"] == "1"


def test_a_model_of_several_names(backend: FakeBackend, served: Served) -> None:
    """Answers have the first one, as vLLM's."""
    backend.card = msgspec.structs.replace(CARD, aliases=("other",))
    backend.script = lambda job: [[Generated(0, 65, FinishReason.STOP)]]
    post = served()
    assert [each["id"] for each in post.get("/v1/models").json()["data"]] == [CARD.name, "other"]
    assert post.get("/v1/models/other").json()["root"] == CARD.name
    for name in (CARD.name, "other"):
        reply = post.request("POST", "/v1/completions", json={"model": name, "prompt": "x"})
        assert (reply.status_code, reply.json()["model"]) == (200, CARD.name)
    reply = post.request("POST", "/v1/completions", json={"model": "third", "prompt": "x"})
    assert reply.status_code == 404 and "this server serves 'acme/tiny' and 'other'" in reply.text


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/completions"), ("POST", "/health"), ("PUT", "/metrics")]
)
def test_wrong_methods(post: Poster, method: str, path: str) -> None:
    response = post.request(method, path)
    assert response.status_code == 405
    assert response.json()["error"]["message"] == f"{method} is not allowed on {path}"
    assert ("POST" if method == "GET" else "GET") in response.headers["allow"]


@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies(backend: FakeBackend, served: Served, chunked: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 500

    post = served(max_body_bytes=1000)
    response = post.request("POST", "/v1/completions", content=chunks() if chunked else b"x" * 1500)
    assert response.status_code == 413
    assert "larger than 1000 bytes" in response.json()["error"]["message"]


def test_a_body_that_says_it_is_too_large_is_not_read(post: Poster) -> None:
    status, _, answer = ask(post.app, (b"content-length", b"%d" % (8 * 2**20 + 1)))
    assert status == 413 and b"larger than 8388608 bytes" in answer


@pytest.mark.parametrize("largest", [0, 7, 10, 99, 100, 299, 4090, 49151])
def test_numbers_up_to_the_largest(largest: int) -> None:
    pattern = re.compile(f"^0*({_decimals(str(largest))})$")
    for number in (
        0,
        1,
        largest // 2,
        max(0, largest - 1),
        largest,
        largest + 1,
        largest + 10,
        largest * 10 + 9,
    ):
        for text in (f"{number}", f"00{number}"):
            assert bool(pattern.match(text)) == (number <= largest), number


def test_all_that_is_served_is_described(post: Poster) -> None:
    response = post.get("/openapi.json")
    document = response.json()
    assert document["openapi"].startswith("3.1")
    for path, methods in document["paths"].items():
        for method in methods:
            url = path.replace("{name}", CARD.name)
            assert post.request(method.upper(), url, json={}).status_code not in (404, 405), path
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/metrics"} <= document["paths"].keys()
    assert post.get("/v1/nothing").status_code == 404
    schemas = document["components"]["schemas"]
    references = set(re.findall(r'"\$ref":"#/components/schemas/([^"]+)"', response.text))
    assert (
        references
        and references <= schemas.keys()
        and response.text.count('"$ref":"#/components/') == (response.text.count('"$ref":'))
    )
    properties = schemas["ChatRequest"]["properties"]
    assert properties["model"]["enum"] == [CARD.name, None]
    assert properties["max_tokens"]["maximum"] == CARD.max_length
    assert properties["stop_token_ids"]["anyOf"][0]["items"]["maximum"] == CARD.vocab_size - 1
    assert properties["thinking_token_budget"]["type"] == "null", "what is refused may only be null"
