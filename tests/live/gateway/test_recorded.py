"""Requests as other people's clients send them: recorded before a server, their prose replaced by our words.

Each file is one client with its version; each line of it one shape of request that it sent.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isthmus.live.gateway import GatewayTokenizer, create_app

from .fake import CARD, FakeBackend, fitting
from .inprocess import Poster

RECORDED = [
    pytest.param(request["path"], request["body"], id=f"{file.stem}-{at}")
    for file in sorted((Path(__file__).parent / "recorded").glob("*.json"))
    for at, request in enumerate(json.loads(file.read_text(encoding="utf-8"))["requests"])
]


@pytest.fixture
def roomy(tokenizer: GatewayTokenizer) -> Poster:
    """An app with room for a prompt of many tools."""
    backend = FakeBackend(fitting)
    backend.card = msgspec.structs.replace(CARD, max_length=16_384)
    return Poster(create_app(backend, tokenizer))


@pytest.mark.parametrize(("path", "body"), RECORDED)
def test_answered(roomy: Poster, path: str, body: dict[str, Any]) -> None:
    response = roomy.request("POST", path, json=body)
    assert response.status_code == 200, response.text
    if body.get("stream"):
        assert response.headers["content-type"].startswith("text/event-stream")
        assert '"error":{' not in response.text
    elif path.startswith("/v1/"):
        assert response.json()["model"] == CARD.name
