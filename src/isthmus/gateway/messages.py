"""Chat messages as clients send them. Text only; everything else is refused by name."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from isthmus.gateway.fields import Refused, Strict, label, only, refuse

ROLES = ("system", "developer", "user", "assistant")


def _parse_role(value: Any) -> str:
    if isinstance(value, str) and value in ROLES:
        return value
    if value in ("tool", "function"):
        raise refuse(f"{value!r} is not supported by this server: it serves no tools")
    raise refuse(f"must be one of {', '.join(ROLES)}")


def _parse_content(value: Any) -> str:
    """A string, or text parts, which are joined by line breaks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refuse('must be a string or a list of {"type": "text", "text": ...} parts')
    return "\n".join(_parse_part(part, f"part {i}") for i, part in enumerate(value))


def _parse_part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise refuse(f'{where} must be an object like {{"type": "text", "text": ...}}')
    if part["type"] != "text":
        raise refuse(f"{where} has type {part['type'][:40]!r}; only 'text' is supported")
    if not isinstance(part.get("text"), str):
        raise refuse(f"{where} must have a string in its field 'text'")
    extra = sorted(part.keys() - {"type", "text"})
    if extra:
        raise refuse(f"{where} has an unknown field {extra[0][:40]!r}")
    text: str = part["text"]
    return text


class Message(Strict):
    role: Annotated[str, BeforeValidator(_parse_role)]
    content: Annotated[str, BeforeValidator(_parse_content)]
    name: str | None = label()

    # OpenAI's answers have these, and clients send answers back as they came.
    refusal: Annotated[Any, Refused] = None
    audio: Annotated[Any, Refused] = None
    annotations: Annotated[Any, only([])] = None
    tool_calls: Annotated[Any, only([])] = None
    function_call: Annotated[Any, Refused] = None
    tool_call_id: Annotated[Any, Refused] = None

    def for_template(self) -> dict[str, str]:
        fields = {"role": self.role, "content": self.content}
        return fields if self.name is None else fields | {"name": self.name}


Messages = Annotated[
    list[Message],
    # fail_fast: one error is enough, and a body can hold a million wrong messages.
    Field(min_length=1, fail_fast=True, description="a list of at least one message"),
]
