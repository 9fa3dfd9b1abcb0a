"""Responses: streams and whole answers are the same, calls go back and forth, and OpenAI's own client reads all."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI
from openai.types.responses import Response, ResponseInputItemParam, ToolParam
from pydantic import BaseModel

from isthmus.core.types import FinishReason
from isthmus.live.gateway import GatewayTokenizer, create_app
from isthmus.live.gateway.messages import OtherToolType
from isthmus.live.gateway.responses import items

from . import folder
from .exchanges import prompt_of
from .fake import CARD, ROOMY, FakeBackend, says, with_logprobs
from .inprocess import Poster, response_events

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
    """Calls both functions."""
    return FakeBackend(lambda _: says([*folder.byte_tokens(ANSWER), folder.EOS], per_batch=3))


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


def test_the_operator_reads_once_what_is_left_out(
    post: Poster, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    reasoning = {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}
    said = {"type": "message", "role": "user", "content": "hi"}
    for stream in (False, True):
        answer = post.post(PATH, input=[reasoning, said], tools=[PATCH, SEARCH, SEARCH], stream=stream)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-isthmus-note"] == "left out: tool custom, tool web_search, item reasoning"
    assert (
        post.post(PATH, input=[said], tools=[SEARCH]).headers["x-isthmus-note"] == "left out: tool web_search"
    )
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3 and len({job.tokens for job in backend.jobs}) == 1
    assert "of requests, tool web_search is left out; answers say so (x-isthmus-note)" in told


FRAGMENTS = [CALL, "Hello", " ", "\n", '{"a": 1}', "<tool_call>", "</tool_call>", "<tool_c", "é", ANSWER, "x!"]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=5).map(lambda parts: "".join(parts).encode())


@given(
    TEXTS | st.binary(max_size=40),
    st.integers(1, 9),
    st.sampled_from(FinishReason),
    st.booleans(),
    st.booleans(),
)
def test_the_stream_is_the_answer_in_pieces(
    tokenizer: GatewayTokenizer, text: bytes, per_batch: int, finish: FinishReason, tools: bool, scores: bool
) -> None:
    steps = with_logprobs(says([*text, folder.EOS], finish, per_batch=per_batch), num_top=1)
    backend = FakeBackend(lambda _: steps)
    backend.card = ROOMY
    post = Poster(create_app(backend, tokenizer))
    fields = {"input": "hi", "top_logprobs": int(scores)} | (
        {"tools": [WEATHER, NOW]} if tools else {"stop": ["x!"]}
    )
    whole = Response.model_validate(post.post(PATH, **fields).json())
    events = response_events(post.post(PATH, stream=True, **fields))
    assert _alike(events[-1].response) == _alike(whole)
    for at, item in enumerate(whole.to_dict(mode="json")["output"]):
        own = [event for event in events if getattr(event, "output_index", None) == at]
        pieces = [event for event in own if event.type.endswith(".delta")]
        said = item["content"][0] if item["type"] == "message" else {"text": item["arguments"], "logprobs": []}
        assert "".join(piece.delta for piece in pieces) == said["text"]
        shown = [each.model_dump() for piece in pieces for each in getattr(piece, "logprobs", [])]
        assert [each["token"] for each in shown] == [each["token"] for each in said.get("logprobs") or []]


def _alike(response: Response) -> dict[str, Any]:
    """Without what is new in each answer."""
    fields = response.to_dict(mode="json") | {"id": "", "created_at": 0, "completed_at": 0}
    output = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in fields["output"]  # type: ignore[attr-defined]
    ]
    return fields | {"output": output}


class Weather(BaseModel):
    city: str


def test_a_round_trip(client: OpenAI, backend: FakeBackend) -> None:
    """By the client's own helpers: what it parsed goes back as it is."""
    tools: Any = [openai.pydantic_function_tool(Weather, name="get_weather")]
    items: list[Any] = [{"role": "user", "content": "Weather?"}]
    with client.responses.stream(model=CARD.name, input=items, tools=tools) as stream:
        final = stream.get_final_response()
    message, call, _ = final.output
    assert message.type == "message" and call.type == "function_call"
    assert call.parsed_arguments == Weather(city="Paris")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    backend.script = lambda _: says([*folder.byte_tokens('{"city": "Rome"}'), folder.EOS])
    for sent in (final.output, [item.to_dict() for item in final.output]):
        asked: Any = [*items, *sent, result]
        again = client.responses.parse(model=CARD.name, input=asked, tools=tools, text_format=Weather)
        assert again.output_parsed == Weather(city="Rome")
        prompt = prompt_of(backend.jobs[-1])
        assert (
            '<assistant>Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}'
            in prompt
        )
        assert "18 degrees" in prompt
