"""The input of a Responses body: items of a conversation, and the chat messages that they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from isthmus.live.gateway import fields
from isthmus.live.gateway.contents import MessageContent
from isthmus.live.gateway.fields import Marked, Unread, only
from isthmus.live.gateway.messages import WholeContent


@dataclass(frozen=True)
class _OrText:
    """A list of objects in whose place a text may stand: it is read as a list of one, `in_one(text)`."""

    in_one: Callable[[str], dict[str, Any]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def read(value: Any) -> Any:
            return [self.in_one(value)] if isinstance(value, str) else value

        return core_schema.no_info_before_validator_function(read, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string"}, handler(schema)]}


def _content(content: MessageContent) -> MessageContent:
    """One part alone as a text."""
    return content[0]["text"] if isinstance(content, list) and len(content) == 1 else content


class _Item(Marked):
    """What items of answers carry besides; they are sent back as they came."""

    id: str | None = fields.label()
    status: Annotated[Any, only("in_progress", "completed", "incomplete")] = None


def _without_type(schema: JsonSchemaValue) -> None:
    schema["required"].remove("type")


class MessageItem(_Item):
    """The one kind of item that need not name its type."""

    model_config = ConfigDict(json_schema_extra=_without_type)

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"] = Field(
        description="one of user, assistant, system, developer"
    )
    content: WholeContent
    phase: Annotated[Any, only("commentary", "final_answer")] = None
    end_turn: Annotated[Any, Unread] = None


class FunctionCallItem(_Item):
    type: Literal["function_call"]
    call_id: str = Field(description="a string")
    name: str = Field(description="the name of a function, a string")
    arguments: str | dict[str, Any] | None = Field(
        description="a string that holds a JSON object, or an object"
    )
    parsed_arguments: Annotated[Any, Unread] = None
    namespace: str | None = fields.label()
    caller: dict[str, Any] | None = fields.free_object()
    background: Annotated[Any, only(False)] = Field(default=None, alias="async")
    async_: Annotated[Any, only(False)] = None
    """The name that `async` has in OpenAI's client, whose objects some send back as they are."""


def _given(name: str) -> JsonSchemaValue:
    return {"properties": {name: {"type": "string"}}, "required": [name]}


class FunctionCallOutputItem(_Item):
    """Without `call_id` where no call asked for it: agents tell the model of what they did themselves, by `name`."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [_given("call_id"), _given("name")]})

    type: Literal["function_call_output"]
    call_id: str | None = fields.text()
    output: WholeContent
    name: str | None = fields.label()
    namespace: str | None = fields.label()
    caller: dict[str, Any] | None = fields.free_object()

    @model_validator(mode="after")
    def _of_something(self) -> Self:
        if self.call_id is None and self.name is None:
            raise fields.refuse("must have the 'call_id' of the call that this is the result of, a string")
        return self


OtherItemType = Literal[
    "additional_tools", "code_interpreter_call", "compaction", "compaction_summary", "compaction_trigger",
    "computer_call", "computer_call_output", "configuration_update", "context_compaction", "file_search_call",
    "ghost_snapshot", "image_generation_call", "mcp_approval_request", "mcp_approval_response", "mcp_call",
    "mcp_list_tools", "program", "program_output", "reasoning", "tool_search_call", "tool_search_output",
    "web_search_call",
]  # fmt: skip


class OtherItem(BaseModel):
    """Of another server's answer, or a client's own. Templates have no place for it: the prompt is without it, and the
    answer says so."""

    model_config = ConfigDict(frozen=True)
    type: OtherItemType


CALLS: dict[str, Callable[[dict[str, Any]], tuple[Any, Any]]] = {
    "custom_tool_call": lambda item: (item.get("name"), {"input": item.get("input")}),
    "local_shell_call": lambda item: ("local_shell", item.get("action")),
    "shell_call": lambda item: ("shell", item.get("action")),
    "apply_patch_call": lambda item: ("apply_patch", item.get("operation")),
}
"""Calls of tools that were no functions: of each, name and arguments of the call of a function that says the same."""


def _as_known(value: Any) -> Any:
    """An item in the words of those that are read."""
    match value:
        case {"type": str(kind)} if kind in CALLS:
            name, arguments = CALLS[kind](value)
            called = {"name": name, "arguments": json.dumps(arguments)}
            return {"type": "function_call", "call_id": value.get("call_id", value.get("id"))} | called
        case {"type": str(kind)} if kind.removesuffix("_output") in CALLS:
            output = value.get("output")
            is_parts = isinstance(output, list) and all(
                isinstance(each, dict) and "type" in each for each in output
            )
            shown = output if is_parts or isinstance(output, str) else json.dumps(output)
            return {
                "type": "function_call_output",
                "call_id": value.get("call_id", value.get("id")),
                "output": shown,
            }
        case dict():
            return {"type": "message"} | value
    return value


# What is dropped alone is no input.
_SOME = {"contains": {"properties": {"type": {"not": {"enum": [*get_args(OtherItemType)]}}}}}
Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | OtherItem
Input = Annotated[
    list[Annotated[Item, Field(discriminator="type"), BeforeValidator(_as_known)]],
    Field(
        min_length=1,
        fail_fast=True,
        description="a string or a list of at least one item",
        json_schema_extra=_SOME,
    ),
    _OrText(lambda text: {"role": "user", "content": text}),
]


def messages_of(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """The messages of a chat completion that say the same. Calls belong to the assistant's message before them."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        match item:
            case MessageItem():
                messages.append({"role": item.role, "content": _content(item.content)})
            case FunctionCallItem():
                _add_call(messages, item)
            case FunctionCallOutputItem():
                identity = item.call_id or item.id or ""
                named = {"name": flat_name(item.namespace, item.name)} if item.name else {}
                result = {"role": "tool", "tool_call_id": identity, "content": _content(item.output)}
                messages.append(result | named)
    return messages


def items_left_out(items: Sequence[Item]) -> list[str]:
    """Each kind of item that the prompt is without."""
    return [f"item {item.type}" for item in items if isinstance(item, OtherItem)]


def flat_name(namespace: str | None, name: str) -> str:
    """By which the model knows a function of a namespace; as at vLLM."""
    return name if namespace is None else f"{namespace}__{name}"


def _add_call(messages: list[dict[str, Any]], item: FunctionCallItem) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    called = {"name": flat_name(item.namespace, item.name), "arguments": item.arguments}
    call = {"id": item.call_id, "type": "function", "function": called}
    messages[-1].setdefault("tool_calls", []).append(call)


def later_turns(items: Sequence[Item]) -> list[int]:
    """Where a conversation could begin later than it does: at what the user said."""
    return [at for at, item in enumerate(items) if at and isinstance(item, MessageItem) and item.role == "user"]


def since(items: Sequence[Item], begin: int) -> list[Item]:
    """The conversation from there on, with what the system and the developer said before."""
    lasting = ("system", "developer")
    kept = [item for item in items[:begin] if isinstance(item, MessageItem) and item.role in lasting]
    return [*kept, *items[begin:]]
