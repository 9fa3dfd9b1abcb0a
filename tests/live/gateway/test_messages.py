"""Messages as templates get them, and answers that come back with the next question, from here or from elsewhere."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest
from openai import OpenAI
from openai.types import chat, responses
from pydantic import BaseModel

from isthmus.live.gateway.fields import field_names
from isthmus.live.gateway.messages import PARTS, AssistantMessage, CalledFunction, Message, ToolCall
from isthmus.live.gateway.responses.items import FunctionCallItem, MessageItem
from isthmus.live.gateway.responses.wire import OutputCall, OutputMessage, OutputText
from isthmus.live.gateway.wire import (
    ChatMessage,
    WrittenCall,
    WrittenFunction,
)

from . import folder
from .fake import CARD, FakeBackend, says
from .inprocess import Poster

read: Any = pydantic.TypeAdapter(Message).validate_python


CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "f", "arguments": '{"a": [1]}'},
}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": "x", "name": "ann"}, {"role": "user", "content": "x", "name": "ann"}),
        (
            {"role": "assistant", "tool_calls": [CALL], "content": None},
            {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": {"a": [1]}}}]},
        ),
        (
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "5"}]},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "5"}]},
        ),
        (
            {"role": "tool", "tool_call_id": "call_1", "content": None},
            {"role": "tool", "tool_call_id": "call_1"},
        ),
        *(
            (
                {"role": "assistant", "content": "x", name: "hm"},
                {"role": "assistant", "content": "x", "reasoning_content": "hm", "thinking": "hm"},
            )
            for name in ("reasoning", "reasoning_content")
        ),
    ],
)
def test_messages_as_templates_get_them(message: dict[str, Any], expected: dict[str, Any]) -> None:
    shown = read(message).for_template()
    assert {name: value for name, value in shown.items() if value is not None} == expected
    assert message["role"] != "assistant" or "content" in shown


@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '{"a": ' + "[" * 900 + "]" * 900 + "}"])
def test_arguments_that_no_prompt_can_hold(post: Poster, arguments: str) -> None:
    call = CALL | {"function": {"name": "f", "arguments": arguments}}
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}, RESULT]
    response = post.chat(messages=said)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["param"] == "messages"


RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "noon"}
NOW: Any = {"type": "function", "function": {"name": "now"}}


@pytest.fixture
def backend() -> FakeBackend:
    """Says something and calls a function."""
    text = 'Let me see.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    return FakeBackend(lambda _: says([*folder.byte_tokens(text), folder.EOS], per_batch=3))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        *[(each, AssistantMessage) for each in (ChatMessage, chat.ChatCompletionMessage)],
        (chat.ParsedChatCompletionMessage, AssistantMessage),
        *[(each, ToolCall) for each in (WrittenCall, chat.ParsedFunctionToolCall)],
        (WrittenFunction, CalledFunction),
        *[(each, MessageItem) for each in (OutputMessage, responses.ParsedResponseOutputMessage)],
        *[(each, FunctionCallItem) for each in (OutputCall, responses.ParsedResponseFunctionToolCall)],
    ],
)
def test_no_field_of_an_answer_is_unknown_in_a_question(written: Any, read: type[BaseModel]) -> None:
    names = written.model_fields if issubclass(written, BaseModel) else written.__struct_fields__
    assert {*names} <= field_names(read).keys()
    parts = {*OutputText.__struct_fields__, *responses.ParsedResponseOutputText.model_fields}
    assert parts <= PARTS["output_text"]["properties"].keys()


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
    call = {"id": message.tool_calls[0].id, "type": "function", "function": {"name": "now", "arguments": "{}"}}
    plain: Any = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    client.chat.completions.create(messages=[*asked, plain, result], **options)
    assert backend.jobs[-2].tokens == backend.jobs[-1].tokens
