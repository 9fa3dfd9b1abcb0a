from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest

from isthmus.live.gateway.messages import Message

from .fake import FakeBackend
from .inprocess import Poster

read: Any = pydantic.TypeAdapter(Message).validate_python


def refused(**fields: object) -> str:
    with pytest.raises(pydantic.ValidationError) as caught:
        read({"role": "user", "content": "hi"} | fields)
    return str(caught.value)


def shown(message: Any) -> dict[str, Any]:
    """What a template may show of it."""
    return {name: value for name, value in message.for_template().items() if value is not None}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "a"},
        {"type": "input_text", "text": "a"},
        {"type": "output_text", "text": "a", "annotations": [{}], "logprobs": []},
        {"type": "refusal", "refusal": "a"},
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {}},
        {"type": "text", "text": "a", "role": "assistant", "refusal": None},
        "a",
    ],
)
def test_parts_of_all_kinds_are_texts(part: object) -> None:
    message = read({"role": "assistant", "content": [part, part]})
    assert message.for_template()["content"] == [{"type": "text", "text": "a"}] * 2


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    came = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "tool_calls": None}
    assert shown(read(came)) == {"role": "assistant", "content": "x"}


def test_names_reach_the_template() -> None:
    message = read({"role": "user", "content": "x", "name": "ann"})
    assert shown(message) == {"role": "user", "content": "x", "name": "ann"}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "must be a string or a list"),
        (5, "must be a string or a list"),
        ([5], "part 0 must be an object"),
        ([{"type": "text", "text": "a", "refusal": "b"}], "part 0 is of type 'text' and has 'refusal', too"),
        ([{"type": "text", "text": "a"}, {"type": "image_url"}], "part 1 has type 'image_url'"),
        ([{"type": "input_audio"}], "part 0 has type 'input_audio'; only 'text' is supported"),
        ([{"type": "text"}], "part 0 must have a string in its field 'text'"),
        ([{"type": "text", "text": "a", "extra": 1}], "part 0 has an unknown field 'extra'"),
    ],
)
def test_wrong_content(content: object, complaint: str) -> None:
    assert complaint in refused(content=content)


def test_wrong_roles() -> None:
    assert "'system', 'developer', 'user', 'assistant', 'tool'" in refused(role="bot")
    assert "union_tag_invalid" in refused(role=["user"])
    assert "union_tag_invalid" in refused(role="function")


def test_each_role_has_fields_of_its_own() -> None:
    assert "unknown" in refused(tool_calls=[])
    assert "unknown" in refused(tool_call_id="x")
    assert "unknown" in refused(role="assistant", tool_call_id="x")
    assert "tool_call_id" in refused(role="tool")


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


NO_OBJECTS = [
    "",
    "null",
    "5",
    '"x"',
    '{"a',
    "[1]",
    "[" * 100_000,
    '{"a": "\\ud800"}',
    '{"a": 1' + "0" * 5000 + "}",
]


@pytest.mark.parametrize("arguments", [*NO_OBJECTS, None, {}], ids=lambda given: str(given)[:9])
def test_arguments_that_are_no_object_are_an_empty_one(arguments: object) -> None:
    """As an answer that was cut off has them, or a client that knows of none."""
    call = {"id": "x", "index": 0, "function": {"name": "f", "arguments": arguments}}
    [call] = shown(read({"role": "assistant", "tool_calls": [call]}))["tool_calls"]
    assert call == {"id": "x", "type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize("is_text", [True, False])
def test_numbers_of_arguments_keep_their_digits(post: Poster, backend: FakeBackend, is_text: bool) -> None:
    written = '{"a": 1.0, "b": 123456789012345678901234567890, "c": [-0.5, true, null]}'
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [CALL]}]
    body = json.dumps({"messages": said}).replace(
        json.dumps(CALL["function"]["arguments"]), json.dumps(written) if is_text else written
    )
    assert post.request("POST", "/v1/chat/completions", content=body).status_code == 200
    assert written in bytes(token for token in backend.jobs[0].tokens if token < 256).decode()


@pytest.mark.parametrize(
    "call",
    [
        5,
        {},
        CALL | {"type": "custom"},
        CALL | {"id": None},
        CALL | {"function": {"name": "f", "arguments": []}},
    ],
)
def test_wrong_calls(call: object) -> None:
    assert "tool_calls" in refused(role="assistant", tool_calls=[call])


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


def test_marks_for_other_servers_caches(post: Poster, backend: FakeBackend) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    assert post.chat(messages=[{"role": "user", "content": [part]}]).status_code == 200
    assert post.chat().status_code == 200
    assert backend.jobs[0].tokens == backend.jobs[1].tokens
