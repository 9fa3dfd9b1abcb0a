"""Every parameter of the calls of the `openai` client: answered, or refused by its name.

The client's own signatures say which there are, so a parameter that a new client brings fails here until it is placed.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai import OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import Response, ResponseCompletedEvent

from isthmus.live.gateway import GatewayTokenizer, create_app

from .fake import CARD, FakeBackend, fitting
from .server import serving

OF_THE_CLIENT = {"extra_headers", "extra_query", "extra_body", "timeout"}
"""Parameters that say how a request is sent."""
TABLE: dict[str, Any] = json.loads((Path(__file__).parent / "tables" / "openai_parameters.json").read_text())
"""By endpoint and parameter: bodies that are answered, and one that is refused."""
ANSWERED, REFUSED = (
    [
        pytest.param(kind, name, fields, id=f"{kind}-{name}-{at}")
        for kind, table in TABLE.items()
        for name, examples in table[outcome].items()
        for at, fields in enumerate(examples if outcome == "answered" else [examples])
    ]
    for outcome in ("answered", "refused")
)


def _parameters(create: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(create).parameters) - OF_THE_CLIENT


def _call(create: Callable[..., Any], **fields: Any) -> None:
    """Sends the request and reads the whole answer."""
    answer = create(**fields)
    if isinstance(answer, Response):
        assert answer.status == "completed"
    elif fields.get("stream"):
        *_, last = answer
        assert isinstance(last, ChatCompletionChunk | Completion | ResponseCompletedEvent)
    else:
        assert len(answer.choices) >= fields.get("n", 1)


@pytest.fixture(scope="module")
def client(tokenizer: GatewayTokenizer) -> Iterator[OpenAI]:
    """Of a server with room for tools in a prompt."""
    backend = FakeBackend(fitting)
    backend.card = msgspec.structs.replace(CARD, max_length=4096)
    with (
        serving(create_app(backend, tokenizer)) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


@pytest.fixture
def creates(client: OpenAI) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """By endpoint, the client's call, and what it needs."""
    return {
        "chat": (client.chat.completions.create, {"messages": [{"role": "user", "content": "hi"}]}),
        "completion": (client.completions.create, {"prompt": "hi"}),
        "response": (client.responses.create, {"input": "hi"}),
    }


def test_every_parameter_has_its_place(creates: Any) -> None:
    for kind, (create, _) in creates.items():
        assert _parameters(create) == TABLE[kind]["answered"].keys() | TABLE[kind]["refused"].keys()


@pytest.mark.parametrize(("kind", "name", "fields"), ANSWERED)
def test_answered(creates: Any, kind: str, name: str, fields: dict[str, Any]) -> None:
    create, needed = creates[kind]
    _call(create, **{"model": CARD.name} | needed | fields)


@pytest.mark.parametrize(("kind", "name", "fields"), REFUSED)
def test_refused(creates: Any, kind: str, name: str, fields: dict[str, Any]) -> None:
    create, needed = creates[kind]
    with pytest.raises(openai.BadRequestError) as refusal:
        create(**{"model": CARD.name} | needed | fields)
    assert refusal.value.param == name
