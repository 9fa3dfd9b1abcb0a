"""The fields of a request that are about tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field

from isthmus.gateway import fields as f
from isthmus.gateway.fields import Checked, Marked, refuse

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


@dataclass(frozen=True)
class NamedFunction:
    """The function that must be called."""

    name: str


MODES = ("none", "auto", "required")


def _parse_choice(value: Any) -> str | NamedFunction:
    if value in MODES:
        return str(value)
    match value:
        case {"type": "function", "function": {"name": str(name), **inner}, **outer} if not inner and not outer:
            return NamedFunction(name)
    raise refuse('must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}')


def object_of(**properties: Any) -> dict[str, Any]:
    """The schema of an object with all of these properties and no others."""
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


ToolChoice = Checked(
    _parse_choice,
    {
        "anyOf": [
            {"enum": list(MODES)},
            object_of(type={"const": "function"}, function=object_of(name={"type": "string"})),
        ]
    },
)
