"""Answers come back with the next question, as the client that got them keeps them: from here or from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from openai import OpenAI
from openai.types import chat, responses
from pydantic import BaseModel

from isthmus.live.gateway import GatewayTokenizer, create_app
from isthmus.live.gateway.chat_wire import (
    ChatMessage,
    WrittenCall,
    WrittenFunction,
)
from isthmus.live.gateway.fields import field_names
from isthmus.live.gateway.messages import AssistantMessage, CalledFunction, ToolCall
from isthmus.live.gateway.responses.items import FunctionCallItem, MessageItem, OutputTextPart
from isthmus.live.gateway.responses.wire import OutputCall, OutputMessage, OutputText

from . import folder
from .fake import CARD, FakeBackend, says
from .inprocess import Poster
from .server import serving

CALL = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "noon"}
NOW: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
MARK = {"type": "ephemeral"}


@pytest.fixture
def backend() -> FakeBackend:
    """One that reads longer prompts, says something and calls a function."""
    text = 'Let me see.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    backend = FakeBackend(lambda _: says([*folder.byte_tokens(text), folder.EOS], per_batch=3))
    backend.card = msgspec.structs.replace(CARD, max_length=4096)
    return backend


@pytest.fixture
def client(backend: FakeBackend, tokenizer: GatewayTokenizer) -> Iterator[OpenAI]:
    with (
        serving(create_app(backend, tokenizer)) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("written", "read"),
    [
        *[(each, AssistantMessage) for each in (ChatMessage, chat.ChatCompletionMessage)],
        (chat.ParsedChatCompletionMessage, AssistantMessage),
        *[(each, ToolCall) for each in (WrittenCall, chat.ParsedFunctionToolCall)],
        (WrittenFunction, CalledFunction),
        *[(each, MessageItem) for each in (OutputMessage, responses.ParsedResponseOutputMessage)],
        *[(each, FunctionCallItem) for each in (OutputCall, responses.ParsedResponseFunctionToolCall)],
        *[(each, OutputTextPart) for each in (OutputText, responses.ParsedResponseOutputText)],
    ],
)
def test_no_field_of_an_answer_is_unknown_in_a_question(written: Any, read: type[BaseModel]) -> None:
    names = written.model_fields if issubclass(written, BaseModel) else written.__struct_fields__
    assert {*names} <= field_names(read).keys()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", ["object", "model_dump", "to_dict"])
def test_an_answer_to_chat_comes_back(client: OpenAI, backend: FakeBackend, form: str, stream: bool) -> None:
    asked: list[Any] = [{"role": "user", "content": "When?"}]
    options: Any = {"model": CARD.name, "tools": [NOW]}
    if stream:
        with client.chat.completions.stream(messages=asked, **options) as events:
            message: Any = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(messages=asked, **options).choices[0].message
    result = RESULT | {"tool_call_id": message.tool_calls[0].id}
    sent = message if form == "object" else getattr(message, form)()
    client.chat.completions.create(messages=[*asked, sent, result], **options)
    call = CALL | {"id": message.tool_calls[0].id}
    plain: Any = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    client.chat.completions.create(messages=[*asked, plain, result], **options)
    assert backend.jobs[-2].tokens == backend.jobs[-1].tokens


# What the clients of other servers keep of an answer.
LITELLM = {
    "tool_calls": None, "function_call": None, "images": [], "annotations": [],
    "provider_specific_fields": {"refusal": None},
    "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "x", "cache_control": MARK}],
}  # fmt: skip
OPENROUTER = {
    "refusal": None, "images": [], "annotations": [{"type": "url_citation", "url_citation": {"url": "https://a.b"}}],
    "reasoning_details": [{"type": "reasoning.encrypted", "data": "x", "id": "r", "format": "f", "index": 0}],
}  # fmt: skip
GEMINI = {"extra_content": {"google": {"thought": True}}}
MISTRAL = {"prefix": False, "tool_calls": None}
OPENAI = {"id": "msg_1", "refusal": None, "audio": None, "annotations": [], "parsed": {"a": 1}, "name": None}


@pytest.mark.parametrize("kept", [LITELLM, OPENROUTER, GEMINI, MISTRAL, OPENAI])
def test_what_others_keep_of_an_answer_changes_nothing(post: Poster, backend: FakeBackend, kept: Any) -> None:
    said = {"role": "assistant", "content": "yo"}
    around = [{"role": "user", "content": "hi"}], [{"role": "user", "content": "again"}]
    for answer in (said, said | kept):
        response = post.chat(messages=[*around[0], answer, *around[1]])
        assert response.status_code == 200, response.text
    assert backend.jobs[0].tokens == backend.jobs[1].tokens


def test_marks_of_other_servers_change_nothing(post: Poster, backend: FakeBackend) -> None:
    """LiteLLM's `cache_control_injection_points` mark messages and tools; Gemini signs calls."""
    said: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        RESULT,
    ]
    marks = {"cache_control": MARK, "provider_specific_fields": {"x": 1}, "extra_content": {"google": {}}}
    signed = CALL | marks | {"index": 0, "function": {"name": "now", "arguments": "{}"} | marks}
    marked = [each | marks | {"id": "x"} for each in said]
    marked[2]["tool_calls"] = [signed]
    tool = NOW | marks | {"function": NOW["function"] | marks}
    for messages, tools in ((said, [NOW]), (marked, [tool])):
        response = post.chat(messages=messages, tools=tools)
        assert response.status_code == 200, response.text
    assert backend.jobs[0].tokens == backend.jobs[1].tokens


def test_a_call_of_a_custom_tool_is_read_as_a_function_s(post: Poster, backend: FakeBackend) -> None:
    custom = {"id": "call_1", "type": "custom", "custom": {"name": "now", "input": "*\n"}}
    plain = CALL | {"function": {"name": "now", "arguments": '{"input": "*\\n"}'}}
    for call in (custom, plain):
        said = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}, RESULT]
        assert post.chat(messages=said, tools=[NOW]).status_code == 200
    assert backend.jobs[0].tokens == backend.jobs[1].tokens


@pytest.mark.parametrize("content", [None, "", [], "yo", [{"type": "text", "text": "yo"}]])
def test_a_refusal_is_what_the_assistant_said(post: Poster, backend: FakeBackend, content: Any) -> None:
    said = [content] if isinstance(content, str) and content else content or []
    parts = [*said, {"type": "refusal", "refusal": "no"}]
    for answer in ({"content": content, "refusal": "no"}, {"content": parts}):
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant"} | answer]
        response = post.chat(messages=messages)
        assert response.status_code == 200, response.text
    assert backend.jobs[0].tokens == backend.jobs[1].tokens


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ({"function_call": {"name": "f", "arguments": "{}"}}, "is not supported"),
        ({"audio": {"id": "audio_1"}}, "is not supported"),
        ({"images": [{"type": "image_url"}]}, "is supported only as []"),
        ({"prefix": True}, "is supported only as false"),
        ({"tool_cals": []}, "is not a known field; did you mean 'tool_calls'?"),
        ({"reasoning_detials": []}, "is not a known field"),
    ],
)
def test_what_would_mean_something_is_refused(
    post: Poster, backend: FakeBackend, kept: Any, words: str
) -> None:
    response = post.chat(
        messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"} | kept]
    )
    assert response.status_code == 400 and words in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == f"messages[1].{next(iter(kept))}"
    assert not backend.jobs


def test_items_of_other_servers_change_nothing(post: Poster, backend: FakeBackend) -> None:
    part = {"type": "output_text", "text": "yo", "annotations": [{}], "logprobs": [], "parsed": {}}
    no = {"type": "refusal", "refusal": "no"}
    kept = {
        "id": "m",
        "status": "completed",
        "phase": "final_answer",
        "end_turn": True,
        "provider_specific_fields": {},
    }
    items: list[Any] = [
        {"role": "user", "content": "hi"},
        kept | {"type": "message", "role": "assistant", "content": [part, no]},
        {"role": "user", "content": [{"type": "input_text", "text": "again", "cache_control": MARK}]},
    ]
    plain = [("user", "hi"), ("assistant", "yo\nno"), ("user", "again")]
    response = post.post("/v1/responses", input=items, client_metadata={"thread": "x"})
    assert response.status_code == 200, response.text
    post.chat(messages=[{"role": role, "content": text} for role, text in plain])
    assert backend.jobs[0].tokens == backend.jobs[1].tokens
