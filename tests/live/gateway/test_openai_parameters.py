"""Every parameter of the calls of the `openai` client: answered, or refused by its name.

The client's own signatures say which there are, so a parameter that a new client brings fails here until it is placed.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import Response, ResponseCompletedEvent

from .fake import CARD, FakeBackend, fitting

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


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(fitting)


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
        parameters = inspect.signature(create).parameters.keys() - OF_THE_CLIENT
        assert parameters == TABLE[kind]["answered"].keys() | TABLE[kind]["refused"].keys()


@pytest.mark.parametrize(("kind", "name", "fields"), ANSWERED)
def test_answered(creates: Any, kind: str, name: str, fields: dict[str, Any]) -> None:
    create, needed = creates[kind]
    answer = create(**{"model": CARD.name} | needed | fields)
    if isinstance(answer, Response):
        assert answer.status == "completed"
    elif fields.get("stream"):
        *_, last = answer
        assert isinstance(last, ChatCompletionChunk | Completion | ResponseCompletedEvent)
    else:
        assert len(answer.choices) >= fields.get("n", 1)


@pytest.mark.parametrize(("kind", "name", "fields"), REFUSED)
def test_refused(creates: Any, kind: str, name: str, fields: dict[str, Any]) -> None:
    create, needed = creates[kind]
    with pytest.raises(openai.BadRequestError) as refusal:
        create(**{"model": CARD.name} | needed | fields)
    assert refusal.value.param == name
