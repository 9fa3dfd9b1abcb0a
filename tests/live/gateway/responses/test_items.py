"""From items to messages."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from isthmus.live.gateway.contents import as_text
from isthmus.live.gateway.responses.items import Input, later_turns, messages_of, since

ITEMS: TypeAdapter[Any] = TypeAdapter(Input)
CALL = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
ANSWERED = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "yo", "annotations": [], "logprobs": None}],
    "phase": None,
}


def messages(*items: Any) -> list[dict[str, Any]]:
    return messages_of(None, ITEMS.validate_python(list(items)))


def test_a_text_is_what_the_user_says() -> None:
    assert messages_of("Be brief.", ITEMS.validate_python("hi")) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


@pytest.mark.parametrize(
    "content",
    [
        "a\nb",
        [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}],
        [{"type": "output_text", "text": "a\nb", "annotations": [{"type": "url_citation"}]}],
    ],
)
@pytest.mark.parametrize("named", [{}, {"type": "message"}])
@pytest.mark.parametrize("role", ["user", "assistant", "system", "developer"])
def test_messages(content: Any, named: dict[str, str], role: str) -> None:
    [message] = messages(named | {"role": role, "content": content})
    assert message["role"] == role and as_text(message["content"]) == "a\nb"
    assert isinstance(message["content"], str) == (isinstance(content, str) or len(content) == 1)


def test_an_answer_sent_back() -> None:
    assert messages(ANSWERED) == [{"role": "assistant", "content": "yo"}]


def test_arguments_of_calls_may_be_objects() -> None:
    [message] = messages(CALL | {"arguments": {"a": 1}})
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": {"a": 1}}


def test_calls_are_the_assistant_s() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    result = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
    parts = result | {"output": [{"type": "input_text", "text": "noon"}]}
    told = {"role": "tool", "tool_call_id": "c1", "content": "noon"}
    assert messages(CALL, CALL, result, ANSWERED, CALL, parts) == [
        {"role": "assistant", "tool_calls": [call, call]},
        told,
        {"role": "assistant", "content": "yo", "tool_calls": [call]},
        told,
    ]


def test_a_result_that_no_call_asked_for_has_a_name() -> None:
    """Codex tells the model so of a goal."""
    result = {"type": "function_call_output", "id": "fco_1", "name": "goal", "output": "noon"}
    told = {"role": "tool", "tool_call_id": "fco_1", "name": "goal", "content": "noon"}
    assert messages(CALL, result) == [*messages(CALL), told]
    assert messages(result | {"namespace": "agent"}) == [told | {"name": "agent__goal"}]


def test_reasoning_is_dropped() -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}
    assert messages(reasoning, {"role": "user", "content": "hi"}) == [{"role": "user", "content": "hi"}]


def test_a_conversation_that_begins_later() -> None:
    def said(role: str) -> dict[str, str]:
        return {"role": role, "content": role}

    items = ITEMS.validate_python(
        [said("system"), said("user"), CALL, said("developer"), said("assistant"), said("user")]
    )
    assert later_turns(items) == [1, 5]
    assert [item.role for item in since(items, 5)] == ["system", "developer", "user"]
    assert since(items, 1) == items
