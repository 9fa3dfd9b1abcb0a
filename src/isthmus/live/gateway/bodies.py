"""From the bytes of a body to a request, or to one clear line that names the field at fault."""

from __future__ import annotations

import difflib
import json
import re
import typing
from collections.abc import Iterator, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any, Literal

import pydantic
from pydantic import BaseModel, Tag, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from isthmus.core.errors import RequestError
from isthmus.live.gateway.fields import Refused, Unread, field_names
from isthmus.live.gateway.problems import compressed

MAX_SHOWN_CHARS, MAX_SHOWN_TAGS = 60, 4
Loc = tuple[int | str, ...]


def refusal(error: pydantic.ValidationError, kind: Any) -> RequestError:
    """The error that answers the first fault pydantic found in JSON of type `kind`: a model, or a union of some."""
    first = error.errors(include_url=False)[0]
    place = _BodyPlace(kind, first["loc"])
    if first["type"] == "unknown_field":
        return _unknown_field(place, first["ctx"]["name"])
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return _wrong_tag(place, first)
    if not place.steps:
        return RequestError("the body must be a JSON object")
    return RequestError(f"{place.path!r} {_complaint(first, place)}", param=place.path)


class _BodyPlace:
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


def _unknown_field(place: _BodyPlace, name: str) -> RequestError:
    """The error is placed at the object that has the field; `name` is the field."""
    param = place.path_of(name)
    return RequestError(f"{param!r} is not a known field{_suggestion(place.inner, name)}", param=param)


def _wrong_tag(place: _BodyPlace, fault: ErrorDetails) -> RequestError:
    """Which of several objects stands here is said by one of its fields, and that is missing or wrong."""
    name = fault["ctx"]["discriminator"].strip("'")
    param = place.path_of(name)
    if fault["type"] == "union_tag_not_found":
        return RequestError(f"{param!r} is required", param=param)
    tag, known = fault["ctx"]["tag"], fault["ctx"]["expected_tags"].replace("'", "").split(", ")
    words = ", ".join([*map(json.dumps, known[:MAX_SHOWN_TAGS]), *["..."] * (len(known) > MAX_SHOWN_TAGS)])
    message = f"{param!r} must be one of {words}, got {_shown(tag)}{_nearest(tag, known)}"
    return RequestError(message, param=param)


def _complaint(fault: ErrorDetails, place: _BodyPlace) -> str:
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


_COMPRESSED = {
    "gzip": (b"\x1f\x8b",),
    "zstd": (b"\x28\xb5\x2f\xfd",),
    "deflate": (b"x\x01", b"x\x9c", b"x\xda"),
}
"""How compressed bodies begin."""
_HEAD_BYTES = 1000
_BOM = b"\xef\xbb\xbf"
_UTF_8 = ("utf-8", "utf-8-sig")
_LOOKS = tuple(
    (re.compile(pattern, re.IGNORECASE), words)
    for pattern, words in (
        (rb"\Z", "it is empty"),
        (rb"--\S+\s+content-disposition|[\w.%+-]+=(?!=)", "it looks like an HTML form; send JSON"),
        (rb"[\[{]*\s*'", "texts are in double quotes"),
        (rb"\{\s*[a-z_]", "names are in double quotes, too"),
    )
)


def parse_body(kind: Any, body: bytes, max_depth: int) -> Any:
    """The body as a `kind`: a model or a union of models. Raises RequestError naming the field at fault."""
    body = _as_utf_8(body)
    if body.count(b"{") + body.count(b"[") > max_depth and _depth(body) > max_depth:
        raise RequestError(f"the body nests lists and objects deeper than {max_depth} (limits.json_depth)")
    try:
        read = _reader(kind).validate_json(body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] != "json_invalid":
            raise refusal(error, kind) from None
        message = first["msg"].removeprefix("Invalid JSON: ") + _likely(body)
        raise RequestError(f"the body is not valid JSON: {message}") from None
    if _MANY_DIGITS.search(body):
        _check_digits(body)
    return read


def _check_digits(body: bytes) -> None:
    """Fractions in schemas came as doubles, and an answer would have other digits. Raises RequestError."""
    fields = json.loads(body, parse_float=Decimal, parse_int=str)
    for name in _WITH_SCHEMAS & fields.keys():
        waiting = [fields[name]]
        while waiting:
            value = waiting.pop()
            if isinstance(value, list | dict):
                waiting += value.values() if isinstance(value, dict) else value
            elif isinstance(value, Decimal) and value != Decimal(repr(float(value))):
                message = f"{name!r} has a number, {value}, of more digits than a double keeps"
                raise RequestError(f"{message}; send the schema as a text to have all of them", param=name)


def _as_utf_8(body: bytes) -> bytes:
    """JSON as Windows and C write it, too: behind a BOM, in UTF-16 or UTF-32, before zeros. Raises RequestError."""
    for coding, beginnings in _COMPRESSED.items():
        if body.startswith(beginnings):
            raise compressed(coding)
    encoding = json.detect_encoding(body)
    if encoding in _UTF_8:
        return body.removeprefix(_BOM).rstrip(b"\0")
    try:
        return body.decode(encoding).encode()
    except UnicodeDecodeError as error:
        name = encoding.upper()
        message = f"the body begins as {name} and is none at byte {error.start}; send JSON in UTF-8"
        raise RequestError(message) from None


def _likely(body: bytes) -> str:
    """What a body that is no JSON may be."""
    head = body.lstrip()[:_HEAD_BYTES]
    for pattern, words in _LOOKS:
        if pattern.match(head):
            return f"; {words}"
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"; byte {error.start} (0x{body[error.start]:02x}) is no UTF-8"
    return ""


_MANY_DIGITS = re.compile(rb"\d[\d.]{16}")
_WITH_SCHEMAS = {"response_format", "guided_json", "json_schema", "structured_outputs", "text", "tools"}
_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*+"?|([\[{])|([\]}])', re.DOTALL)


def _depth(body: bytes) -> int:
    """Of JSON, how deep its lists and objects lie in each other."""
    depth = deepest = 0
    for found in _BRACKET.finditer(body):
        if found.lastindex == 1:
            depth += 1
            deepest = max(deepest, depth)
        elif found.lastindex == 2:
            depth -= 1
    return deepest


@lru_cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
