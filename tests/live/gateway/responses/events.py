"""Events as OpenAI's client types them."""

from __future__ import annotations

import json
import typing
from typing import Any

import httpx
from openai.types.responses import Response, ResponseStreamEvent

_UNION = typing.get_args(ResponseStreamEvent)[0]
KINDS = {typing.get_args(kind.model_fields["type"].annotation)[0]: kind for kind in typing.get_args(_UNION)}

BEGINNING = ["response.created", "response.in_progress"]
MESSAGE_BEGUN = ["response.output_item.added", "response.content_part.added"]
DELTA = "response.output_text.delta"
MESSAGE_DONE = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


def read_events(response: httpx.Response) -> list[Any]:
    """The events of a stream, each checked against its type in OpenAI's client, with its name and its number."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(KINDS[event["type"]].model_validate(event))
        if "response" in event:
            Response.model_validate(event["response"])
    return events


def kinds(events: list[Any]) -> list[str]:
    return [event.type for event in events]
