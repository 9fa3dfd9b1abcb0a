"""Calls of functions, from definitions to items and back."""

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

from isthmus.core.types import FinishReason
from isthmus.live.gateway import GatewayTokenizer, create_app
from isthmus.live.gateway.messages import Other
from isthmus.live.gateway.responses import items

from .. import folder
from ..fake import CARD, FakeBackend, says, with_logprobs
from ..inprocess import Poster
from ..server import serving
from .events import BEGINNING, DELTA, MESSAGE_BEGUN, MESSAGE_DONE, kinds, read_events

PATH = "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "description": "Of a city", "parameters": PARAMETERS}
NOW = {"type": "function", "name": "now"}
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "d", "format": LARK}
SEARCH = {"type": "web_search", "external_web_access": False}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
ARGUMENTS = "response.function_call_arguments"
ADDED, DONE = "response.output_item.added", "response.output_item.done"


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


def test_items(post: Poster) -> None:
    body = post.post(PATH, input="Weather?", tools=[WEATHER, NOW]).json()
    Response.model_validate(body)
    unique = body["id"].removeprefix("resp_")
    message, weather, now = body["output"]
    assert message["content"][0]["text"] == "Let me see."
    assert weather == {
        "id": f"fc_{unique}_1",
        "type": "function_call",
        "status": "completed",
        "call_id": f"call_{unique}_1",
        "name": "get_weather",
        "arguments": '{"city": "Paris"}',
    }
    assert (now["name"], now["arguments"], now["id"]) == ("now", "{}", f"fc_{unique}_2")
    assert body["status"] == "completed"
    assert body["tools"] == [WEATHER, NOW]


def test_events(post: Poster) -> None:
    events = read_events(post.post(PATH, input="Weather?", tools=[WEATHER, NOW], stream=True))
    found = kinds(events)
    runs = [kind for at, kind in enumerate(found) if at == 0 or found[at - 1] != kind]
    called = [ADDED, f"{ARGUMENTS}.delta", f"{ARGUMENTS}.done", DONE]
    message = [*MESSAGE_BEGUN, DELTA, *MESSAGE_DONE]
    assert runs == [*BEGINNING, *message, *called, *called, "response.completed"]
    assert [event.output_index for event in events if event.type == ADDED] == [0, 1, 2]
    pieces = [event.delta for event in events if event.type == f"{ARGUMENTS}.delta" and event.output_index == 1]
    assert len(pieces) > 1
    assert "".join(pieces) == '{"city": "Paris"}'
    assert [item.arguments for item in events[-1].response.output[1:]] == ['{"city": "Paris"}', "{}"]


def test_nothing_but_a_call_has_no_message(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda _: says([*folder.byte_tokens(CALL), folder.EOS])
    [item] = post.post(PATH, input="Weather?", tools=[WEATHER]).json()["output"]
    assert item["type"] == "function_call"


def test_a_call_cut_short(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda _: says(folder.byte_tokens(CALL[:60]), FinishReason.LENGTH)
    body = post.post(PATH, input="Weather?", tools=[WEATHER]).json()
    [item] = body["output"]
    assert (body["status"], item["status"]) == ("incomplete", "incomplete")
    assert '{"city": "Paris"}'.startswith(item["arguments"])


def test_one_call_at_most(post: Poster) -> None:
    fields = {"input": "Weather?", "tools": [WEATHER, NOW], "parallel_tool_calls": False}
    body = post.post(PATH, **fields).json()
    assert [item.get("name") for item in body["output"]] == [None, "get_weather"]
    assert body["parallel_tool_calls"] is False


@pytest.mark.parametrize("choice", ["auto", "none", "required", {"type": "function", "name": "now"}])
def test_the_same_job_as_a_chat_completion_s(post: Poster, backend: FakeBackend, choice: Any) -> None:
    chosen = {"type": "function", "function": {"name": "now"}} if isinstance(choice, dict) else choice
    tools = [
        {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
        for tool in (WEATHER, NOW)
    ]
    body = post.post(PATH, input="hi", tools=[WEATHER, NOW], tool_choice=choice, seed=1).json()
    assert body["tool_choice"] == choice
    assert post.chat(tools=tools, tool_choice=chosen, seed=1).status_code == 200
    ours, theirs = (msgspec.structs.replace(job, request="") for job in backend.jobs)
    assert ours == theirs
    assert bool(ours.sampling.grammar) == (choice not in ("auto", "none"))


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(post: Poster, backend: FakeBackend, mode: str) -> None:
    """As of chat completions, in either form."""
    allowed = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "now"}]}
    inner = {"mode": mode, "tools": [SEARCH, {"type": "function", "function": {"name": "now"}}]}
    chat = {"type": "allowed_tools", "allowed_tools": inner}
    tools = [
        {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
        for tool in (WEATHER, NOW)
    ]
    body = post.post(PATH, input="hi", tools=[WEATHER, NOW], tool_choice=allowed).json()
    Response.model_validate(body)
    assert (body["tool_choice"], body["tools"]) == (allowed, [WEATHER, NOW])
    assert "get_weather" not in prompt_of(backend)
    assert bool(backend.jobs[0].sampling.grammar) == (mode == "required")
    assert post.chat(tools=tools, tool_choice=chat).status_code == 200
    assert post.post(PATH, input="hi", tools=[WEATHER, NOW], tool_choice=chat).json()["tool_choice"] == chat
    first, *others = (msgspec.structs.replace(job, request="", sampling=None) for job in backend.jobs)
    assert [first] * 2 == others


def test_of_allowed_tools_those_count_that_are_functions(post: Poster, backend: FakeBackend) -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [SEARCH, {"type": "function", "name": "now"}]}
    assert post.post(PATH, input="hi", tools=[WEATHER, NOW, SEARCH], tool_choice=allowed).status_code == 200
    assert "get_weather" not in prompt_of(backend) and "now" in prompt_of(backend)


def kinds_of(union: Any) -> set[str]:
    """What `type` may be in the objects of OpenAI's client."""
    found = set[str]()
    for member in get_args(union):
        if hasattr(member, "__annotations__"):
            found.update(get_args(get_args(get_type_hints(member, include_extras=True)["type"])[0]))
        else:
            found |= kinds_of(member)
    return found


SPACE = {"type": "namespace", "name": "mcp_clock", "description": "d", "tools": [NOW, PATCH]}


@pytest.mark.parametrize("stream", [False, True])
def test_functions_of_a_namespace_are_called_in_it(post: Poster, backend: FakeBackend, stream: bool) -> None:
    """Codex has those of MCP servers and of its sub-agents so. Beside it is one of the same name without one."""
    calls = [
        f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in ("mcp_clock__now", "now")
    ]
    backend.script = lambda _: says([*folder.byte_tokens("".join(calls)), folder.EOS], per_batch=3)
    response = post.post(PATH, input="When?", tools=[SPACE, NOW], stream=stream)
    answer = read_events(response)[-1].response.to_dict() if stream else response.json()
    inside, outside = answer["output"]
    assert answer["tools"] == [SPACE | {"tools": [NOW]}, NOW]
    assert (inside["namespace"], inside["name"], outside["name"]) == ("mcp_clock", "now", "now")
    assert "namespace" not in outside or outside["namespace"] is None
    assert response.headers["x-isthmus-note"] == "left out: tool custom"
    again: list[Any] = [{"role": "user", "content": "When?"}, inside]
    again.append({"type": "function_call_output", "call_id": inside["call_id"], "output": "noon"})
    assert post.post(PATH, input=again, tools=[SPACE, NOW]).status_code == 200
    assert prompt_of(backend).count('"mcp_clock__now"') == 2  # its definition and its call


def test_every_kind_of_openai_s_is_known() -> None:
    assert kinds_of(ToolParam) == {"function", "namespace", *get_args(Other)}
    known = {*get_args(items.Other), *items.CALLS, *(f"{kind}_output" for kind in items.CALLS)}
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


def test_without_functions_it_is_as_without_tools(post: Poster, backend: FakeBackend) -> None:
    assert post.post(PATH, input="hi", tools=[SEARCH, PATCH]).json()["tools"] == []
    assert post.post(PATH, input="hi").status_code == 200
    assert backend.jobs[0].tokens == backend.jobs[1].tokens


@pytest.mark.parametrize(
    ("call", "result", "name", "arguments"),
    [
        (
            {"type": "custom_tool_call", "id": "ctc_1", "name": "apply_patch", "input": "*** Begin\n"},
            {"type": "custom_tool_call_output", "output": "Done"},
            "apply_patch",
            {"input": "*** Begin\n"},
        ),
        (
            {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"], "env": {}}},
            {"type": "local_shell_call_output", "output": "Done"},
            "local_shell",
            {"type": "exec", "command": ["ls"], "env": {}},
        ),
        (
            {"type": "shell_call", "action": {"commands": ["ls"]}},
            {"type": "function_call_output", "output": [{"type": "input_text", "text": "Done"}]},
            "shell",
            {"commands": ["ls"]},
        ),
        (
            {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}},
            {"type": "apply_patch_call_output", "output": "Done"},
            "apply_patch",
            {"type": "delete_file", "path": "a"},
        ),
    ],
)
def test_calls_of_other_tools_are_read_as_calls(
    post: Poster, backend: FakeBackend, call: dict[str, Any], result: dict[str, Any], name: str, arguments: Any
) -> None:
    called = {"type": "function_call", "call_id": "c", "name": name, "arguments": json.dumps(arguments)}
    output = {"type": "function_call_output", "call_id": "c", "output": "Done"}
    said, more = {"call_id": "c", "status": "completed"}, {"call_id": "c"}
    for sent in ([call | said, result | more], [called, output]):
        response = post.post(PATH, input=[{"role": "user", "content": "hi"}, *sent], tools=[NOW])
        assert response.status_code == 200, response.text
        assert "x-isthmus-note" not in response.headers
    assert backend.jobs[0].tokens == backend.jobs[1].tokens


REFUSED = [
    ({"tools": [{"type": "functoin", "name": "f"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].type"),
    ({"tools": [SPACE | {"tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
    ({"tools": [SPACE, SPACE]}, "tools"),
    ({"tools": [NOW, PATCH], "tool_choice": {"type": "custom", "name": "apply_patch"}}, "tool_choice"),
    ({"tools": [PATCH], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [NOW, {"type": "function", "function": {"name": "f"}}]}, "tools[1].function"),
    ({"tools": [{"type": "function", "name": "no spaces"}]}, "tools[0].name"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [NOW, NOW]}, "tools"),
    ({"tools": [NOW], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    *(
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools"} | rest}, "tool_choice")
        for rest in (
            {},
            {"mode": "auto", "tools": []},
            {"mode": "none", "tools": [NOW]},
            {"mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            {"mode": "auto", "tools": [{"type": "mcp", "server_label": "x"}]},
        )
    ),
    (
        {"tools": [NOW, WEATHER | {"parameters": {"type": "no"}}], "tool_choice": "required"},
        "tools[1].parameters",
    ),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_refused_by_name(post: Poster, backend: FakeBackend, fields: dict[str, Any], param: str) -> None:
    response = post.post(PATH, input="hi", **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert repr(param) in error["message"]
    assert not backend.jobs


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


def test_log_probabilities_are_those_of_the_message(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda _: with_logprobs(says([*folder.byte_tokens(ANSWER), folder.EOS], per_batch=5), 1)
    output = post.post(PATH, input="hi", tools=[WEATHER, NOW], top_logprobs=1).json()["output"]
    [part] = output[0]["content"]
    assert "".join(each["token"] for each in part["logprobs"]) == part["text"] == "Let me see."


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
