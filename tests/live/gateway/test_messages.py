"""Messages as templates get them, and answers that come back with the next question, from here or from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pydantic
import pytest
from openai import OpenAI
from openai.types import chat, responses
from pydantic import BaseModel

from isthmus.live.gateway import GatewayTokenizer, create_app
from isthmus.live.gateway.fields import field_names
from isthmus.live.gateway.messages import PARTS, AssistantMessage, CalledFunction, Message, ToolCall
from isthmus.live.gateway.responses.items import FunctionCallItem, MessageItem
from isthmus.live.gateway.responses.wire import OutputCall, OutputMessage, OutputText
from isthmus.live.gateway.wire import ChatMessage, WrittenCall, WrittenFunction

from . import folder
from .fake import CARD, FakeBackend, says
from .inprocess import Poster
from .server import serving

read: Any = pydantic.TypeAdapter(Message).validate_python


def refused(**fields: object) -> str:
    with pytest.raises(pydantic.ValidationError) as caught:
        read({"role": "user", "content": "hi"} | fields)
    return str(caught.value)


def shown(message: Any) -> dict[str, Any]:
    """What a template may show of it."""
    return {name: value for name, value in message.for_template().items() if value is not None}


def test_names_reach_the_template() -> None:
    message = read({"role": "user", "content": "x", "name": "ann"})
    assert shown(message) == {"role": "user", "content": "x", "name": "ann"}


CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "f", "arguments": '{"a": [1]}'},
}


def test_calls_and_results() -> None:
    message = read({"role": "assistant", "tool_calls": [CALL], "content": None})
    called = {"name": "f", "arguments": {"a": [1]}}
    assert shown(message) == {"role": "assistant", "tool_calls": [CALL | {"function": called}]}
    assert "content" in message.for_template()
    result = read({"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "5"}]})
    assert shown(result)["content"] == [{"type": "text", "text": "5"}]
    assert "content" not in shown(read({"role": "tool", "tool_call_id": "call_1", "content": None}))


def test_an_assistant_may_have_said_nothing() -> None:
    assert read({"role": "assistant"}).for_template()["content"] is None


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_reaches_the_template_by_its_names(name: str) -> None:
    message = shown(read({"role": "assistant", "content": "x", name: "hm"}))
    assert (message["reasoning_content"], message["thinking"]) == ("hm", "hm")


@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '{"a": ' + "[" * 900 + "]" * 900 + "}"])
def test_arguments_that_no_prompt_can_hold(post: Poster, arguments: str) -> None:
    """What is nested too deep is refused, at whatever depth that is."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    response = post.chat(messages=[*said, {"role": "tool", "content": "1", "tool_call_id": "a"}])
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["param"] == "messages"


NOW_CALL = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "noon"}
NOW: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


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
    call = NOW_CALL | {"id": message.tool_calls[0].id}
    plain: Any = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    client.chat.completions.create(messages=[*asked, plain, result], **options)
    assert backend.jobs[-2].tokens == backend.jobs[-1].tokens


# What the clients of other servers keep of an answer.
