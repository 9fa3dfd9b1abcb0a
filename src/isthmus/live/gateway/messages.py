"""Chat messages as clients send them. Text only; everything else is refused by name.

Which fields a message has is said by its role. Clients send answers back as they came from this server or another:
fields of answers that mean nothing in a question are not read, or taken as long as they are empty where they would
mean something that is not done here.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from isthmus.live.gateway.contents import Content
from isthmus.live.gateway.fields import NULL, Checked, Marked, Refused, Unread, label, only, refuse, text

_TEXT_OF = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""By the type of a part, which field has its text."""
_UNSAID = {kind: {*_TEXT_OF.values()} - {name} for kind, name in _TEXT_OF.items()}
"""The fields of other parts' texts, which some clients send as null."""
_UNREAD = (*Marked.model_fields, "annotations", "logprobs", "parsed", "role", "id")
"""Of parts, too, which come back with answers."""


def _parse_content(value: Any) -> Content:
    """A string, or text parts, all as parts of type text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refuse('must be a string or a list of {"type": "text", "text": ...} parts')
    return [_parse_part(part, f"part {i}") for i, part in enumerate(value)]


def _parse_part(part: Any, where: str) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise refuse(f'{where} must be an object like {{"type": "text", "text": ...}}')
    kind = part["type"]
    if kind not in _TEXT_OF:
        raise refuse(f"{where} has type {kind[:40]!r}; only 'text' is supported")
    if not isinstance(part.get(_TEXT_OF[kind]), str):
        raise refuse(f"{where} must have a string in its field {_TEXT_OF[kind]!r}")
    other = next((name for name in _UNSAID[kind] if part.get(name) is not None), "")
    if other:
        raise refuse(f"{where} is of type {kind!r} and has {other!r}, too")
    extra = sorted(part.keys() - _PARTS[kind]["properties"].keys())
    if extra:
        raise refuse(f"{where} has an unknown field {extra[0][:40]!r}")
    return {"type": "text", "text": part[_TEXT_OF[kind]]}


def _part(kind: str) -> dict[str, Any]:
    """The schema of such a part."""
    texts: dict[str, Any] = {"type": {"const": kind}, _TEXT_OF[kind]: {"type": "string"}}
    return {
        "type": "object",
        "properties": texts | {name: {} for name in _UNREAD} | dict.fromkeys(_UNSAID[kind], NULL),
        "required": ["type", _TEXT_OF[kind]],
        "additionalProperties": False,
    }


_PARTS = {kind: _part(kind) for kind in _TEXT_OF}
_CONTENT = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [{"type": "string"}, *_PARTS.values()]}}]
}
WholeContent = Annotated[Any, Checked(_parse_content, _CONTENT, nullable=False)]
SomeContent = Annotated[Any, Checked(_parse_content, _CONTENT)]


class _Message(Marked):
    id: Annotated[Any, Unread] = None
    name: str | None = label()
    content: SomeContent = None

    def for_template(self) -> dict[str, Any]:
        """What of it a template may show; None where it has no such thing."""
        return self.model_dump(include={"role", "content", "name"})


class SystemMessage(_Message):
    role: Literal["system", "developer"]
    content: WholeContent


class UserMessage(_Message):
    role: Literal["user"]
    content: WholeContent


class ToolMessage(_Message):
    role: Literal["tool"]
    content: SomeContent
    tool_call_id: str = Field(description="the id of the call that this is the result of, a string")

    def for_template(self) -> dict[str, Any]:
        return super().for_template() | {"tool_call_id": self.tool_call_id}


class CalledFunction(Marked):
    parsed_arguments: Annotated[Any, Unread] = None
    """As OpenAI's client read them."""
    name: str = Field(description="the name of a function, a string")
    arguments: str | dict[str, Any] | None = Field(
        default=None, description="a string that holds a JSON object, or an object"
    )

    def for_template(self) -> dict[str, Any]:
        """Templates go through arguments as an object. What is none, as an answer that was cut off has it, is shown as
        an empty one."""
        arguments: Any = self.arguments
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
                json.dumps(arguments, ensure_ascii=False).encode()  # half a character is no text
            except (ValueError, RecursionError):
                arguments = None
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else {}}


class ToolCall(Marked):
    id: str = Field(description="a string")
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(default=None, description="an integer")
    """Of a call put together from a streamed answer."""

    def for_template(self) -> dict[str, Any]:
        return {"id": self.id, "type": self.type, "function": self.function.for_template()}


def _as_function(value: Any) -> Any:
    """A custom tool's call, which has a text for its input, as a function's."""
    match value:
        case {"type": "custom", "custom": {"name": name, "input": text}, **rest}:
            called = {"name": name, "arguments": json.dumps({"input": text})}
            return rest | {"type": "function", "function": called}
    return value


class AssistantMessage(_Message):
    role: Literal["assistant"]
    tool_calls: list[Annotated[ToolCall, BeforeValidator(_as_function)]] | None = Field(
        default=None, fail_fast=True, description="a list of calls"
    )
    reasoning_content: str | None = text()
    reasoning: str | None = text()
    """The newer word for the same."""
    refusal: str | None = text()
    """Stands in OpenAI's answers in place of content; read as a part of type refusal is."""

    # Of answers, in the words of OpenAI, its client, LiteLLM, OpenRouter, Copilot, Groq, Cohere and Azure.
    annotations: Annotated[Any, Unread] = None
    parsed: Annotated[Any, Unread] = None
    thinking_blocks: Annotated[Any, Unread] = None
    reasoning_items: Annotated[Any, Unread] = None
    reasoning_details: Annotated[Any, Unread] = None
    reasoning_opaque: Annotated[Any, Unread] = None
    executed_tools: Annotated[Any, Unread] = None
    tool_plan: Annotated[Any, Unread] = None
    citations: Annotated[Any, Unread] = None
    context: Annotated[Any, Unread] = None

    audio: Annotated[Any, Refused] = None
    images: Annotated[Any, only([])] = None
    function_call: Annotated[Any, Refused] = None
    prefix: Annotated[Any, only(False)] = None
    """Mistral's and DeepSeek's word for `continue_final_message`."""

    def for_template(self) -> dict[str, Any]:
        shown = super().for_template()
        if self.refusal:
            said = [self.content] if isinstance(self.content, str) else self.content
            shown["content"] = _parse_content([*(said if self.content else ()), self.refusal])
        if self.tool_calls:
            shown["tool_calls"] = [call.for_template() for call in self.tool_calls]
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        return shown | {"reasoning_content": reasoning, "thinking": reasoning}


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Messages = Annotated[
    list[Message],
    # fail_fast: one error is enough, and a body can hold a million wrong messages.
    Field(min_length=1, fail_fast=True, description="a list of at least one message"),
]
