"""Responses: streams and whole answers are the same, calls go back and forth, and OpenAI's own client reads all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI
from openai.types.responses import Response, ResponseInputItemParam, ToolParam
from pydantic import BaseModel

from isthmus.core.errors import OverloadedError, UnavailableError
from isthmus.core.types import FinishReason
from isthmus.live.gateway import GatewayTokenizer, create_app
from isthmus.live.gateway.messages import OtherToolType
from isthmus.live.gateway.responses import items

from .. import folder
from ..fake import CARD, HANG, FakeBackend, says, with_logprobs
from ..inprocess import Poster
from ..server import serving
from .events import DELTA, read_events

PATH = "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "description": "Of a city", "parameters": PARAMETERS}
NOW = {"type": "function", "name": "now"}
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "d", "format": LARK}
SEARCH = {"type": "web_search", "external_web_access": False}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'


@pytest.fixture
def backend() -> FakeBackend:
    """One that reads longer prompts, and calls both functions."""
    backend = FakeBackend(lambda _: says([*folder.byte_tokens(ANSWER), folder.EOS], per_batch=3))
    backend.card = msgspec.structs.replace(CARD, max_length=4096)
    return backend


@pytest.fixture
def client(backend: FakeBackend, tokenizer: GatewayTokenizer) -> Iterator[OpenAI]:
    with (
        serving(create_app(backend, tokenizer)) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def prompt_of(backend: FakeBackend) -> str:
    tokens = (
        b"he" if token == folder.HE else bytes([token]) for token in backend.jobs[-1].tokens if token <= 256
    )
    return b"".join(tokens).decode()


def kinds_of(union: Any) -> set[str]:
    """What `type` may be in the objects of OpenAI's client."""
    found = set[str]()
    for member in get_args(union):
        if hasattr(member, "__annotations__"):
            found.update(get_args(get_args(get_type_hints(member, include_extras=True)["type"])[0]))
        else:
            found |= kinds_of(member)
    return found


def test_every_kind_of_openai_s_is_known() -> None:
    assert kinds_of(ToolParam) == {"function", "namespace", *get_args(OtherToolType)}
    known = {*get_args(items.OtherItemType), *items.CALLS, *(f"{kind}_output" for kind in items.CALLS)}
    own = {"message", "function_call", "function_call_output", "item_reference"}
    assert kinds_of(ResponseInputItemParam) <= known | own


def test_codex_is_told_what_was_left_out(
    post: Poster, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer, streamed or not, is what it were without; the operator reads it once."""
    codex: dict[str, Any] = {
        "instructions": "Help.",
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "1"},
        "max_tool_calls": 3,
        "background": False,
    }
    reasoning = {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}
    searched = {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "q"}}
    snapshot = {"type": "ghost_snapshot", "ghost_commit": {"id": "a", "parent": None}}
    said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    others = [
        {"type": "local_shell"},
        SEARCH,
        PATCH,
        SEARCH,
        {"type": "image_generation", "output_format": "png"},
    ]
    note = "left out: tool local_shell, tool web_search, tool custom, tool image_generation"
    note += ", item reasoning, item web_search_call, item ghost_snapshot"
    for stream in (False, True):
        answers = [
            post.post(
                PATH, input=[reasoning, searched, said, snapshot], tools=[*others, NOW], stream=stream, **codex
            ),
            post.post(PATH, input=[said], tools=[NOW], stream=stream, **codex),
        ]
        assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
        assert [answer.headers.get("x-isthmus-note") for answer in answers] == [note, None]
        assert backend.jobs[-2].tokens == backend.jobs[-1].tokens
    assert post.post(PATH, input=[said], tools=[*others, NOW]).json()["tools"] == [NOW]
    told = [record.getMessage() for record in caplog.records]
    assert (
        len(told) == 7 and "of requests, tool web_search is left out; answers say so (x-isthmus-note)" in told
    )


FRAGMENTS = [CALL, "Hello", " ", "\n", '{"a": 1}', "<tool_call>", "</tool_call>", "<tool_c", "é", ANSWER]


@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=5).map("".join),
    st.integers(1, 9),
    st.sampled_from(FinishReason),
)
def test_the_stream_is_the_answer_in_pieces(
    tokenizer: GatewayTokenizer, text: str, per_batch: int, finish: FinishReason
) -> None:
    steps = with_logprobs(says([*folder.byte_tokens(text), folder.EOS], finish, per_batch=per_batch), num_top=1)
    backend = FakeBackend(lambda _: steps)
    backend.card = msgspec.structs.replace(CARD, max_length=4096)
    post = Poster(create_app(backend, tokenizer))
    fields = {"input": "hi", "tools": [WEATHER, NOW], "top_logprobs": 1}
    whole = post.post(PATH, **fields).json()
    events = read_events(post.post(PATH, stream=True, **fields))
    assert _alike(events[-1].response.to_dict(mode="json")["output"]) == _alike(whole["output"])
    for at, item in enumerate(whole["output"]):
        own = [event for event in events if getattr(event, "output_index", None) == at]
        pieces = [event for event in own if event.type.endswith(".delta")]
        said = item["content"][0] if item["type"] == "message" else {"text": item["arguments"], "logprobs": []}
        assert "".join(piece.delta for piece in pieces) == said["text"]
        shown = [each for piece in pieces for each in getattr(piece, "logprobs", [])]
        assert [each.token for each in shown] == [each["token"] for each in said["logprobs"]]


def _alike(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


class Weather(BaseModel):
    city: str


def test_a_round_trip(client: OpenAI, backend: FakeBackend) -> None:
    tools: Any = [openai.pydantic_function_tool(Weather, name="get_weather")]
    items: list[Any] = [{"role": "user", "content": "Weather?"}]
    with client.responses.stream(model=CARD.name, input=items, tools=tools) as stream:
        final = stream.get_final_response()
    message, call, _ = final.output
    assert message.type == "message"
    assert call.type == "function_call"
    assert call.parsed_arguments == Weather(city="Paris")
    items += final.output
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"})
    backend.script = lambda _: says([*folder.byte_tokens("It is 18."), folder.EOS])
    again = client.responses.parse(model=CARD.name, input=items, tools=tools)
    assert again.output_text == "It is 18."
    prompt = prompt_of(backend)
    assert (
        '<assistant>Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}' in prompt
    )
    assert "18 degrees" in prompt


def test_objects_of_the_client_sent_back_as_they_are(client: OpenAI) -> None:
    tools: Any = [WEATHER, NOW]
    answer = client.responses.create(model=CARD.name, input="Weather?", tools=tools)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": json.dumps({"c": 18})}
        for item in answer.output
        if item.type == "function_call"
    ]
    for sent in ([item.model_dump() for item in answer.output], [item.to_dict() for item in answer.output]):
        items: Any = [{"role": "user", "content": "Weather?"}, *sent, *results]
        assert client.responses.create(model=CARD.name, input=items, tools=tools).status == "completed"


@given(st.lists(st.binary(max_size=6), max_size=8), st.sampled_from(FinishReason), st.booleans())
def test_a_stream_of_any_bytes_is_the_answer_in_pieces(
    tokenizer: GatewayTokenizer, batches: list[bytes], finish: FinishReason, scores: bool
) -> None:
    tokens = [token for batch in batches for token in batch] + [folder.EOS]
    steps = with_logprobs(says(tokens, finish, per_batch=3), num_top=1)
    post = Poster(create_app(FakeBackend(lambda _: steps), tokenizer))
    fields = {"input": "hi", "stop": ["x!"], "top_logprobs": int(scores)}
    whole = Response.model_validate(post.post(PATH, **fields).json())
    events = read_events(post.post(PATH, stream=True, **fields))
    [message] = whole.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    deltas = [event for event in events if event.type == DELTA]
    assert "".join(event.delta for event in deltas) == part.text
    logprobs = [each.model_dump() for event in deltas for each in event.logprobs]
    assert logprobs == [each.model_dump() for each in part.logprobs or ()]
    own = {"id", "created_at", "completed_at"}
    last = events[-1].response.model_dump(exclude=own)
    assert last["output"][0].pop("id") != message.id
    first = whole.model_dump(exclude=own)
    del first["output"][0]["id"]
    assert last == first


MODEL = "acme/tiny"


class Person(BaseModel):
    name: str
    age: int


BOB = [*folder.byte_tokens('{"name": "Bob", "age": 4}'), folder.EOS]


def prompt(backend: FakeBackend) -> str:
    return bytes(token for token in backend.jobs[-1].tokens if token < 256).decode()


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
