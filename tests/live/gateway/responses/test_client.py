"""OpenAI's own client, over a real socket."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from isthmus.core.errors import OverloadedError, UnavailableError
from isthmus.core.types import FinishReason

from .. import folder
from ..fake import HANG, FakeBackend, says, with_logprobs
from .events import BEGINNING, DELTA, MESSAGE_BEGUN, MESSAGE_DONE, kinds

MODEL = "acme/tiny"
EMOJI = [*folder.byte_tokens("grüß 😀!"), folder.EOS]


class Person(BaseModel):
    name: str
    age: int


BOB = [*folder.byte_tokens('{"name": "Bob", "age": 4}'), folder.EOS]


def prompt(backend: FakeBackend) -> str:
    return bytes(token for token in backend.jobs[-1].tokens if token < 256).decode()


def test_create(client: OpenAI, backend: FakeBackend) -> None:
    backend.script = lambda _: says(EMOJI, cached_tokens=4)
    answer = client.responses.create(model=MODEL, input="hi", instructions="Be brief.", metadata={"a": "b"})
    assert answer.output_text == "grüß 😀!"
    assert answer.status == "completed"
    assert answer.metadata == {"a": "b"}
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(EMOJI)
    assert answer.usage.input_tokens_details.cached_tokens == 4
    assert prompt(backend) == "<system>Be brief.\n<user>hi\n<assistant>"


@pytest.mark.parametrize("as_dict", [False, True])
def test_several_turns(client: OpenAI, backend: FakeBackend, as_dict: bool) -> None:
    backend.script = lambda _: says([*folder.byte_tokens("yo"), folder.EOS])
    items: list[Any] = [{"role": "user", "content": "hi"}]
    answer = client.responses.create(model=MODEL, input=items)
    items += [item.model_dump() for item in answer.output] if as_dict else answer.output
    client.responses.create(model=MODEL, input=[*items, {"role": "user", "content": "again"}])
    assert prompt(backend) == "<user>hi\n<assistant>yo\n<user>again\n<assistant>"


def test_stream(client: OpenAI, backend: FakeBackend) -> None:
    backend.script = lambda _: says(EMOJI)
    events = list(client.responses.create(model=MODEL, input="hi", stream=True))
    deltas = [event for event in events if event.type == DELTA]
    expected = [*BEGINNING, *MESSAGE_BEGUN, *([DELTA] * len(deltas)), *MESSAGE_DONE, "response.completed"]
    assert kinds(events) == expected
    assert "".join(event.delta for event in deltas) == "grüß 😀!"


def test_stream_helper(client: OpenAI, backend: FakeBackend) -> None:
    backend.script = lambda _: says(BOB)
    with client.responses.stream(model=MODEL, input="hi", text_format=Person) as stream:
        snapshots = [event.snapshot for event in stream if event.type == DELTA]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == '{"name": "Bob", "age": 4}'
    assert final.output_parsed == Person(name="Bob", age=4)


def test_parse(client: OpenAI, backend: FakeBackend) -> None:
    backend.script = lambda _: says(BOB)
    answer = client.responses.parse(model=MODEL, input="Bob is 4", text_format=Person)
    assert answer.output_parsed == Person(name="Bob", age=4)
    assert "maximum" in backend.jobs[0].sampling.grammar or "integer" in backend.jobs[0].sampling.grammar


def test_logprobs(client: OpenAI, backend: FakeBackend) -> None:
    backend.script = lambda _: with_logprobs(says([97], FinishReason.LENGTH), num_top=1)
    answer = client.responses.create(
        model=MODEL, input="hi", include=["message.output_text.logprobs"], top_logprobs=1
    )
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    [message] = answer.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    [token] = part.logprobs or []
    assert (token.token, token.logprob, [top.token for top in token.top_logprobs]) == ("a", -97 / 8, ["\x00"])


def test_errors(client: OpenAI, backend: FakeBackend) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model=MODEL, input="hi", previous_response_id="resp_1")
    assert bad.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="hi")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
    backend.script = lambda _: [OverloadedError("full", retry_after_s=3)]
    with pytest.raises(openai.RateLimitError):
        client.responses.create(model=MODEL, input="hi", stream=True)


def test_an_error_in_a_stream(client: OpenAI, backend: FakeBackend) -> None:
    backend.script = lambda _: [*says(folder.byte_tokens("ab"), finish=None), UnavailableError("node lost")]
    with client.responses.stream(model=MODEL, input="hi") as stream:
        *_, last = stream
    assert last.type == "response.failed"
    assert last.response.output_text == "ab"
    assert last.response.error is not None
    assert last.response.error.message == "node lost"


def test_closing_a_stream_cancels(client: OpenAI, backend: FakeBackend) -> None:
    backend.script = lambda _: [*says([97], finish=None), HANG]
    with client.responses.create(model=MODEL, input="hi", stream=True) as stream:
        next(iter(stream))
    assert backend.wait_cancelled(1) == [backend.jobs[0].request]
