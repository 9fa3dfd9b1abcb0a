"""The document says what the server does."""

from __future__ import annotations

import re
from typing import Any

import pytest

from isthmus.live.gateway import app
from isthmus.live.gateway.openapi import _decimals
from isthmus.live.gateway.tokenizer import GatewayTokenizer

from .fake import CARD, FakeBackend
from .inprocess import Poster

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
