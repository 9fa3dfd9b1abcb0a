"""Requests to an app without a socket, and the app called as an ASGI server calls it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pydantic
from openai.types.responses import Response, ResponseStreamEvent
from starlette.types import ASGIApp, Message, Scope

_EVENTS: Any = pydantic.TypeAdapter(ResponseStreamEvent)


class Poster:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path)

    def chat(self, **fields: Any) -> httpx.Response:
        """A chat with sensible fields, changed by `fields`; a field given as ... is left out."""
        usual = {"model": "acme/tiny", "messages": [{"role": "user", "content": "hi"}]}
        return self._post("/v1/chat/completions", usual | fields)

    def complete(self, **fields: Any) -> httpx.Response:
        return self._post("/v1/completions", {"model": "acme/tiny", "prompt": "hi"} | fields)

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self._post(path, fields)

    def _post(self, path: str, fields: dict[str, Any]) -> httpx.Response:
        return self.request("POST", path, json={k: v for k, v in fields.items() if v is not ...})


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of each event of a stream that ended with [DONE], without that."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def response_events(response: httpx.Response) -> list[Any]:
    """The events of a streamed response, each checked against its type in OpenAI's client, its name and its number."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert (name, number) == (f"event: {event['type']}", event["sequence_number"])
        events.append(_EVENTS.validate_python(event))
        if "response" in event:
            Response.model_validate(event["response"])
    return events


def http_scope(path: str, *headers: tuple[bytes, bytes]) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [*headers],
        "server": ("test", 80),
        "client": ("test", 1),
    }


Served = Callable[..., Poster]
"""Makes an app with the settings that it is given by name."""


class Connection:
    """One request as an ASGI server sees it, with a client that can go away at any moment."""

    def __init__(self, app: ASGIApp, path: str, body: dict[str, Any]) -> None:
        self.sent: list[Message] = []
        self._app = app
        self._path = path
        self._body = json.dumps(body).encode()
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()

    async def serve(self) -> None:
        """Runs the app on this request until it returns."""
        self._inbox.put_nowait({"type": "http.request", "body": self._body, "more_body": False})
        scope = http_scope(self._path, (b"content-type", b"application/json"))
        await self._app(scope, self._inbox.get, self._send)

    def disconnect(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
