"""From pydantic's error list to one clear line that names the field."""

from __future__ import annotations

import difflib
import json
import types
import typing
from typing import Any

import pydantic
from pydantic import BaseModel
from pydantic_core import ErrorDetails

from isthmus.errors import RequestError
from isthmus.gateway.fields import Refused

MAX_SHOWN_CHARS = 60


def refusal(error: pydantic.ValidationError, kind: type[BaseModel]) -> RequestError:
    """The error that answers the first fault pydantic found in a body of type `kind`."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "unknown_field":
        return _unknown_field(first, kind)
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if not first["loc"]:
        return RequestError("the body must be a JSON object")
    param = _path(first["loc"])
    return RequestError(f"{param!r} {_complaint(first, kind)}", param=param)


def _unknown_field(fault: ErrorDetails, kind: type[BaseModel]) -> RequestError:
    """The error is placed at the object that has the field; `name` is the field."""
    name = fault["ctx"]["name"]
    param = _path((*fault["loc"], name))
    owner, _ = _locate(kind, (*fault["loc"], name))
    return RequestError(f"{param!r} is not a known field{_suggestion(owner, name)}", param=param)


def _path(loc: tuple[int | str, ...]) -> str:
    """`messages[0].content` of `("messages", 0, "content")`."""
    path = ""
    for step in loc:
        path += f"[{step}]" if isinstance(step, int) else f".{step[:MAX_SHOWN_CHARS]}"
    return path.removeprefix(".")


def _complaint(fault: ErrorDetails, kind: type[BaseModel]) -> str:
    field = _locate(kind, fault["loc"])[1]
    if fault["type"] == "refused":
        return fault["msg"]
    if fault["type"] == "missing":
        return "is required"
    in_list = isinstance(fault["loc"][-1], int)
    if field is not None and field.description and not in_list:
        return f"must be {field.description}, got {_shown(fault['input'])}"
    message = fault["msg"]
    return f"is wrong: {message[:1].lower()}{message[1:]}, got {_shown(fault['input'])}"


def _locate(kind: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[type[BaseModel], Any]:
    """The model that owns the last field name of `loc`, and that field, or None if it has none such."""
    owner, field = kind, None
    for step in loc:
        if isinstance(step, int):
            continue
        if field is not None:
            owner = _nested(field.annotation) or owner
        field = owner.model_fields.get(step)
    return owner, field


def _nested(annotation: Any) -> type[BaseModel] | None:
    """The request model inside `Model | None` or `list[Model]`."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    return next(filter(None, map(_nested, typing.get_args(annotation))), None)


def _suggestion(owner: type[BaseModel], name: str) -> str:
    served = [field for field, info in owner.model_fields.items() if Refused not in info.metadata]
    near = difflib.get_close_matches(name[:MAX_SHOWN_CHARS], served, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
