"""Exchanges over HTTP that were recorded: what other people's clients sent is answered, and of what wires say, all is
known: each answer, each event of a stream, each refusal.

Of clients each has one line for each shape of request it sent: equal fields, values of the same types, short enums
kept; their prose is replaced by our words.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from isthmus.live.gateway import GatewayTokenizer, create_app

from .exchanges import exchanges, outcome, script
from .fake import CARD, FakeBackend, fitting
from .inprocess import Poster, response_events

SENT, KNOWN = exchanges(wires=False), exchanges(wires=True)
HELLO = {"text": "hello", "end": "stop"}


def answered(
    tokenizer: GatewayTokenizer, backend: FakeBackend, exchange: dict[str, Any], max_length: int
) -> Any:
    backend.card = msgspec.structs.replace(CARD, max_length=max_length)
    sent = {"content": exchange["raw"].encode("latin-1")} if "raw" in exchange else {}
    sent |= {"json": exchange["body"]} if "body" in exchange else {}
    post = Poster(create_app(backend, tokenizer))
    headers = exchange.get("headers", {})
    return post.request(exchange.get("method", "POST"), exchange["path"], headers=headers, **sent)


@pytest.mark.parametrize("name", SENT)
def test_answered(tokenizer: GatewayTokenizer, name: str) -> None:
    """In an app with room for a prompt of many tools."""
    exchange = SENT[name]
    response = answered(tokenizer, FakeBackend(fitting), exchange, 16_384)
    assert response.status_code == 200, response.text
    if exchange["body"].get("stream"):
        assert response.headers["content-type"].startswith("text/event-stream")
        assert '"error":{' not in response.text
    elif exchange["path"].startswith("/v1/"):
        assert response.json()["model"] == CARD.name


@pytest.mark.parametrize("name", KNOWN)
def test_known(tokenizer: GatewayTokenizer, name: str) -> None:
    """What is not said of jobs is not known; no refused request has one."""
    exchange = KNOWN[name]
    backend = FakeBackend(script(exchange.get("says", HELLO)))
    response = answered(tokenizer, backend, exchange, exchange.get("max_length", 256))
    asked = exchange.get("body") if isinstance(exchange.get("body"), dict) else {}
    jobs = backend.jobs if "jobs" in exchange else None
    expected = {
        key: exchange[key] for key in ("status", "told", "answer", "each", "events", "jobs") if key in exchange
    }
    found = outcome(response, jobs, seeded="seed" in (asked or {}))
    if response.status_code == 400:
        found["answer"]["error"]["message"] = shortened(found["answer"], expected["answer"])
    assert found == expected
    if response.status_code in (400, 404) and "says" not in exchange:
        assert not backend.jobs
    if not exchange.get("untyped"):
        fits_openai_s_types(exchange["path"], response)


def shortened(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """The message of a refusal, without what the expected one leaves out."""
    message: str = found["error"]["message"]
    whole: str = expected["error"]["message"]
    fits = re.fullmatch(".*".join(map(re.escape, whole.split("…"))), message)
    return whole if fits else message


def fits_openai_s_types(path: str, response: Any) -> None:
    """What the types of OpenAI's client take."""
    if response.status_code != 200 or path not in TYPES:
        return
    whole, piece = TYPES[path]
    if not response.headers["content-type"].startswith("text/event-stream"):
        whole.model_validate(response.json())
    elif piece is None:
        response_events(response)
    else:
        *events, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        for event in events:
            body = json.loads(event.removeprefix("data: "))
            assert "error" in body or piece.model_validate(body)


TYPES: dict[str, Any] = {
    "/v1/chat/completions": (ChatCompletion, ChatCompletionChunk),
    "/v1/responses": (Response, None),
}
