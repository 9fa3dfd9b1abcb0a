"""Requests as other people's clients send them: recorded before a server, their prose replaced by our words.

Each file is one client with its version; each line of it one shape of request that it sent.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isthmus.gateway import GatewayTokenizer, create_app
from isthmus.types import Job, TokenLogprobs

from . import folder
from .fake import CARD, FakeBackend, Step, says, with_logprobs
from .inprocess import Poster

RECORDED = [
    pytest.param(request["path"], request["body"], id=f"{file.stem}-{at}")
    for file in sorted((Path(__file__).parent / "recorded").glob("*.json"))
    for at, request in enumerate(json.loads(file.read_text(encoding="utf-8"))["requests"])
]


def _answer(job: Job) -> list[Step]:
    """What fits most requests: a JSON object, with the scores that are asked for."""
    steps = says([*folder.byte_tokens('{"name": "Bob", "age": 4}'), folder.EOS])
    if job.sampling.logprobs is not None:
        steps = with_logprobs(steps, job.sampling.logprobs)
    if job.sampling.prompt_logprobs is not None:
        [first], *rest = steps
        scores = tuple(TokenLogprobs(-1.0, ((token, -1.0),), rank=1) for token in job.tokens[1:])
        steps = [[msgspec.structs.replace(first, prompt_logprobs=scores)], *rest]
    return steps


@pytest.fixture
def roomy(tokenizer: GatewayTokenizer) -> Poster:
    """An app with room for a prompt of many tools."""
    backend = FakeBackend(_answer)
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
