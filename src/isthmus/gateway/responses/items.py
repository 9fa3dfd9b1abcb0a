"""The input of a Responses body: items of a conversation, and the chat messages that they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from isthmus.gateway import fields as f
from isthmus.gateway.fields import Strict, only


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


class TextPart(Strict):
    type: Literal["input_text", "text"]
    text: str = Field(description="a string")
    prompt_cache_breakpoint: dict[str, Any] | None = f.free_object()


class OutputTextPart(Strict):
    """Of an answer that is sent back. Only its text is the model's."""

    type: Literal["output_text"]
    text: str = Field(description="a string")
    annotations: list[Any] | None = Field(default=None, description="a list")
    logprobs: list[Any] | None = Field(default=None, description="a list")


_PARTS = "a string, or a list of parts like {type: input_text, text: ...}"
# fail_fast: one error is enough, and a body can hold a million wrong items.
Parts = Annotated[
    list[Annotated[TextPart | OutputTextPart, Field(discriminator="type")]],
    Field(fail_fast=True, description=_PARTS),
    _OrText(lambda text: {"type": "input_text", "text": text}),
]
InputParts = Annotated[
    list[TextPart],
    Field(fail_fast=True, description=_PARTS),
    _OrText(lambda text: {"type": "input_text", "text": text}),
]


def _content(parts: Sequence[TextPart | OutputTextPart]) -> str | list[dict[str, str]]:
    texts = [part.text for part in parts]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


class _Item(Strict):
    """What items of answers carry besides; they are sent back as they came."""

    id: str | None = f.label()
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
    content: Parts
    phase: Annotated[Any, only("commentary", "final_answer")] = None


class FunctionCallItem(_Item):
    type: Literal["function_call"]
    call_id: str = Field(description="a string")
    name: str = Field(description="the name of a function, a string")
    arguments: str | dict[str, Any] | None = Field(
        description="a string that holds a JSON object, or an object"
    )
    namespace: Annotated[Any, only()] = None
    caller: dict[str, Any] | None = f.free_object()
    background: Annotated[Any, only(False)] = Field(default=None, alias="async")
    async_: Annotated[Any, only(False)] = None
    """The name that `async` has in OpenAI's client, whose objects some send back as they are."""


class FunctionCallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str = Field(description="the id of the call that this is the result of, a string")
    output: InputParts
    name: str | None = f.label()
    namespace: Annotated[Any, only()] = None
    caller: dict[str, Any] | None = f.free_object()


class ReasoningItem(_Item):
    """Of another server's answer. Templates are not shown it."""

    type: Literal["reasoning"]
    summary: list[Any] | None = Field(default=None, description="a list")
    content: list[Any] | None = Field(default=None, description="a list")
    encrypted_content: str | None = f.text()


def _with_type(value: Any) -> Any:
    return {"type": "message"} | value if isinstance(value, dict) else value


# What is dropped alone is no input.
_SOME = {"contains": {"properties": {"type": {"not": {"const": "reasoning"}}}}}
Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
Input = Annotated[
    list[Annotated[Item, Field(discriminator="type"), BeforeValidator(_with_type)]],
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
                result = {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
                messages.append(result)
    return messages


def _add_call(messages: list[dict[str, Any]], item: FunctionCallItem) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    called = {"name": item.name, "arguments": item.arguments}
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
