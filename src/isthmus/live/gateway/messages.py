"""Chat messages as clients send them, and the fields that are about tools. Text only; all else is refused by name.

Which fields a message has is said by its role. Clients send answers back as they came from this server or another:
fields of answers that mean nothing in a question are not read, or taken as long as they are empty where they would
mean something that is not done here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field

from isthmus.live.gateway import fields
from isthmus.live.gateway.contents import MessageContent
from isthmus.live.gateway.fields import NULL, Checked, Marked, Refused, Unread, label, only, refuse, text

_TEXT_OF = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""By the type of a part, which field has its text."""
_UNSAID = {kind: {*_TEXT_OF.values()} - {name} for kind, name in _TEXT_OF.items()}
"""The fields of other parts' texts, which some clients send as null."""
_UNREAD = (*Marked.model_fields, "annotations", "logprobs", "parsed", "role", "id")
"""Of parts, too, which come back with answers."""


def _parse_content(value: Any) -> MessageContent:
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
    extra = sorted(part.keys() - PARTS[kind]["properties"].keys())
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


PARTS = {kind: _part(kind) for kind in _TEXT_OF}
"""Schemas of parts, by type."""
_CONTENT = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [{"type": "string"}, *PARTS.values()]}}]
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


NAME = r"^[a-zA-Z0-9_.:-]{1,128}$"


class FunctionDefinition(Marked):
    name: str = Field(pattern=NAME, description="1 to 128 letters, digits, or any of _.:-")
    description: str | None = fields.text()
    parameters: dict[str, Any] | None = Field(default=None, description="a JSON schema, an object")
    strict: bool | None = fields.boolean()
    """Where all functions are, calls follow their schemas. Calls that are forced do anyway."""

    def for_template(self) -> dict[str, Any]:
        """In the order that models were taught; with parameters even if there are none, which templates expect."""
        shown: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            shown["description"] = self.description
        return shown | {"parameters": self.parameters or {"type": "object", "properties": {}}}


class Tool(Marked):
    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        return {"type": "function", "function": self.function.for_template()}


OtherToolType = Literal[
    "apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search", "image_generation",
    "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search", "web_search",
    "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
]  # fmt: skip


class OtherTool(BaseModel):
    """A tool that OpenAI runs, or that only its models are taught to call. Models here are not told of it, and the
    answer says so (`left_out`): agents name such tools whether or not the model needs them."""

    model_config = ConfigDict(frozen=True)
    type: OtherToolType


Function = TypeVar("Function", bound=BaseModel)
Tools = list[Annotated[Function | OtherTool, Discriminator("type")]]


def tools() -> Any:
    """The field of all tools of a request. `functions` and `left_out` part them."""
    return Field(default=None, alias="tools", fail_fast=True, description="a list of tools")


def functions(tools: Sequence[Function | OtherTool] | None) -> list[Function] | None:
    return None if tools is None else [tool for tool in tools if not isinstance(tool, OtherTool)]


def left_out(tools: Sequence[BaseModel] | None) -> list[str]:
    """Each kind of tool that the model is not told of."""
    return [f"tool {tool.type}" for tool in tools or () if isinstance(tool, OtherTool)]


MODES = ("none", "auto", "required")


@dataclass(frozen=True)
class NamedFunction:
    """The function that must be called."""

    name: str


@dataclass(frozen=True)
class AllowedFunctions:
    """The model is told of no others. `mode`: one of MODES."""

    mode: str
    names: frozenset[str]


def parse_choice(value: Any) -> str | NamedFunction | AllowedFunctions:
    """In the form of chat completions, or in that of responses: clients write either to both."""
    name = _function_name(value)
    if value in MODES:
        return str(value)
    if name is not None:
        return NamedFunction(name)
    match value:
        case {"type": "allowed_tools", "allowed_tools": dict(inner), **rest} if not rest:
            value = {"type": "allowed_tools", **inner}
    match value:
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*listed], **rest} if (
            not rest
        ):
            names = [_function_name(each) for each in listed if not _is_other(each)]
            if names and None not in names:
                return AllowedFunctions(mode, frozenset(filter(None, names)))
    raise refuse(
        'must be "none", "auto", "required", {"type": "function", ...} with its name, or '
        '{"type": "allowed_tools", ...} with a mode, "auto" or "required", and tools, of which one is a function'
    )


def _function_name(value: Any) -> str | None:
    match value:
        case {"type": "function", "function": {"name": str(name), **inner}, **rest} if not inner and not rest:
            return name
        case {"type": "function", "name": str(name), **rest} if not rest:
            return name
    return None


def _is_other(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") in get_args(OtherToolType)


def object_of(**properties: Any) -> dict[str, Any]:
    """The schema of an object with all of these properties and no others."""
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_NAME = {"name": {"type": "string"}}
_FUNCTION = {
    "anyOf": [
        object_of(type={"const": "function"}, **each) for each in (_NAME, {"function": object_of(**_NAME)})
    ]
}
_OTHER = {"type": "object", "properties": {"type": {"enum": [*get_args(OtherToolType)]}}, "required": ["type"]}
_ALLOWED = {
    "mode": {"enum": ["auto", "required"]},
    "tools": {"type": "array", "items": {"anyOf": [_FUNCTION, _OTHER]}, "minItems": 1, "contains": _FUNCTION},
}
CHOICE = {
    "anyOf": [
        {"enum": list(MODES)},
        _FUNCTION,
        *(
            object_of(type={"const": "allowed_tools"}, **each)
            for each in (_ALLOWED, {"allowed_tools": object_of(**_ALLOWED)})
        ),
    ]
}
ToolChoice = Checked(parse_choice, CHOICE)
