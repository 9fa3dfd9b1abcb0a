"""From pydantic's error list to one clear line that names the field."""

from __future__ import annotations

import difflib
import json
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pydantic
from pydantic import BaseModel, Tag
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from isthmus.core.errors import RequestError
from isthmus.live.gateway.fields import Refused, Unread, field_names

MAX_SHOWN_CHARS, MAX_SHOWN_TAGS = 60, 4
Loc = tuple[int | str, ...]


def refusal(error: pydantic.ValidationError, kind: Any) -> RequestError:
    """The error that answers the first fault pydantic found in JSON of type `kind`: a model, or a union of some."""
    first = error.errors(include_url=False)[0]
    place = _Place(kind, first["loc"])
    if first["type"] == "unknown_field":
        return _unknown_field(place, first["ctx"]["name"])
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return _wrong_tag(place, first)
    if not place.steps:
        return RequestError("the body must be a JSON object")
    return RequestError(f"{place.path!r} {_complaint(first, place)}", param=place.path)


class _Place:
    """Where in a body a fault lies. `steps`: names and numbers that lead there; `field`: the last named one, None if no
    model declares it; `inner`: the model that stands there.

    Of a union, pydantic's places also name the member that a value was read as, which no client knows: those are left
    out.
    """

    def __init__(self, kind: Any, loc: Loc) -> None:
        self.steps: list[int | str] = []
        self.field: FieldInfo | None = None
        members = dict(_members(kind))
        for step in loc:
            if isinstance(step, str):
                if len(members) > 1:
                    members = {tag: member for tag, member in members.items() if tag == step}
                    continue
                owner = next(iter(members.values()), None)
                self.field = field_names(owner).get(step) if owner else None
                members = dict(_members(self.field.annotation)) if self.field else {}
            self.steps.append(step)
        self.inner = next(iter(members.values()), None)

    @property
    def path(self) -> str:
        """`messages[0].content`"""
        return self.path_of()

    def path_of(self, *more: str) -> str:
        path = ""
        for step in (*self.steps, *more):
            path += f"[{step}]" if isinstance(step, int) else f".{step[:MAX_SHOWN_CHARS]}"
        return path.removeprefix(".")


def _members(annotation: Any, tag: str | None = None) -> Iterator[tuple[str, type[BaseModel]]]:
    """The models inside a field's type, each under the tags that a union knows it by."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, *metadata = typing.get_args(annotation)
        tag = next((each.tag for each in metadata if isinstance(each, Tag)), tag)
    if isinstance(annotation, type) and typing.get_origin(annotation) is None:
        if issubclass(annotation, BaseModel):
            for each in [tag] if tag is not None else _literals(annotation) or [annotation.__name__]:
                yield each, annotation
        return
    for inner in typing.get_args(annotation):
        yield from _members(inner, tag)


def _literals(model: type[BaseModel]) -> list[str]:
    """What the model's fields of one or a few fixed words may be: one of them tells it from others."""
    types = [info.annotation for info in model.model_fields.values() if info.is_required()]
    return [word for kind in types if typing.get_origin(kind) is Literal for word in typing.get_args(kind)]


def _unknown_field(place: _Place, name: str) -> RequestError:
    """The error is placed at the object that has the field; `name` is the field."""
    param = place.path_of(name)
    return RequestError(f"{param!r} is not a known field{_suggestion(place.inner, name)}", param=param)


def _wrong_tag(place: _Place, fault: ErrorDetails) -> RequestError:
    """Which of several objects stands here is said by one of its fields, and that is missing or wrong."""
    name = fault["ctx"]["discriminator"].strip("'")
    param = place.path_of(name)
    if fault["type"] == "union_tag_not_found":
        return RequestError(f"{param!r} is required", param=param)
    tag, known = fault["ctx"]["tag"], fault["ctx"]["expected_tags"].replace("'", "").split(", ")
    words = ", ".join([*map(json.dumps, known[:MAX_SHOWN_TAGS]), *["..."] * (len(known) > MAX_SHOWN_TAGS)])
    message = f"{param!r} must be one of {words}, got {_shown(tag)}{_nearest(tag, known)}"
    return RequestError(message, param=param)


def _complaint(fault: ErrorDetails, place: _Place) -> str:
    if fault["type"] == "refused":
        return fault["msg"]
    if fault["type"] == "missing":
        return "is required"
    in_list = isinstance(place.steps[-1], int)
    if place.field is not None and place.field.description and not in_list:
        return f"must be {place.field.description}, got {_shown(fault['input'])}"
    message = fault["msg"]
    return f"is wrong: {message[:1].lower()}{message[1:]}, got {_shown(fault['input'])}"


def _suggestion(owner: type[BaseModel] | None, name: str) -> str:
    known = field_names(owner) if owner else {}
    served = [
        name for name, info in known.items() if Refused not in info.metadata and Unread not in info.metadata
    ]
    return _nearest(name, served)


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name[:MAX_SHOWN_CHARS], known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
