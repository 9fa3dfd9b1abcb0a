"""The fields of a request that are about tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field

from isthmus.live.gateway import fields as f
from isthmus.live.gateway.fields import Checked, Marked, refuse

NAME = r"^[a-zA-Z0-9_.:-]{1,128}$"


class FunctionDefinition(Marked):
    name: str = Field(pattern=NAME, description="1 to 128 letters, digits, or any of _.:-")
    description: str | None = f.text()
    parameters: dict[str, Any] | None = Field(default=None, description="a JSON schema, an object")
    strict: bool | None = f.boolean()
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


Other = Literal[
    "apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search", "image_generation",
    "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search", "web_search",
    "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
]  # fmt: skip


class OtherTool(BaseModel):
    """A tool that OpenAI runs, or that only its models are taught to call. Models here are not told of it, and the
    answer says so (`left_out`): agents name such tools whether or not the model needs them."""

    model_config = ConfigDict(frozen=True)
    type: Other


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
    return isinstance(value, dict) and value.get("type") in get_args(Other)


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
_OTHER = {"type": "object", "properties": {"type": {"enum": [*get_args(Other)]}}, "required": ["type"]}
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
