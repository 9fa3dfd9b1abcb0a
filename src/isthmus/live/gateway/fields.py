"""Building blocks of the request models: each field says in words what it expects, and as JSON Schema what it takes.

The words are the field's description, and a refused value is answered with them (refusals.py). Every field may
be absent or null, which mean the same. The schema goes into the OpenAPI document (openapi.py).
"""

from __future__ import annotations

import difflib
import json
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, lru_cache
from typing import Annotated, Any, Literal

import pydantic
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    TypeAdapter,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from isthmus.core.errors import RequestError
from isthmus.live.gateway.http import compressed

MAX_LABEL_CHARS = 256
MAX_STOPS = 16
MAX_STOP_CHARS = 4096
MAX_SEED = 2**63 - 1
MAX_INT = 2**31 - 1
NULL = {"type": "null"}
TOKEN = {"type": "integer", "minimum": 0, "format": "token-id"}
"""Of the formats `token-id`, `num-tokens` and `model-name` the document gives the served model's own bounds."""


@cache
def field_names(kind: type[BaseModel]) -> dict[str, Any]:
    """The fields of a model by the names that JSON has."""
    return {info.alias or name: info for name, info in kind.model_fields.items()}


class Strict(BaseModel):
    """Types as JSON has them: 1.0 is the integer 1, `"1"` is not; no NaN; and no field that is not declared."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: Any) -> Any:
        """Stops at the first unknown field. "forbid" lists them all, which takes seconds for a hostile body."""
        if not isinstance(value, dict):
            return value
        known = field_names(cls)
        for name in value:
            if name not in known:
                raise PydanticCustomError("unknown_field", "unknown", {"name": name})
        return {name: whole(each) for name, each in value.items()}


def whole(value: Any) -> Any:
    """The integer that a number without a fraction is; anything else as it is."""
    return int(value) if type(value) is float and value.is_integer() else value


@dataclass(frozen=True)
class Checked:
    """A value that `check` reads: what it returns is the field's value. `schema`: what JSON it takes. Where it is
    `nullable`, null is not checked.

    `check` raises `refuse(...)`.
    """

    check: Callable[[Any], Any]
    schema: JsonSchemaValue
    nullable: bool = True

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def read(value: Any) -> Any:
            return None if value is None and self.nullable else self.check(value)

        return core_schema.no_info_before_validator_function(read, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [self.schema, NULL]} if self.nullable and self.schema != NULL else self.schema


def number(low: float, high: float) -> Any:
    return Field(default=None, ge=low, le=high, description=f"a number from {low:g} to {high:g}")


def integer(low: int, high: int) -> Any:
    return Field(default=None, ge=low, le=high, description=f"an integer from {low} to {high}")


def num_tokens(low: int) -> Any:
    """A number of tokens, which the document bounds by the model's context."""
    words = f"an integer from {low} to {MAX_INT}"
    return Field(
        default=None, ge=low, le=MAX_INT, description=words, json_schema_extra={"format": "num-tokens"}
    )


def _always(words: str, **options: Any) -> Callable[[], Any]:
    return lambda: Field(default=None, description=words, **options)


model_name = _always("the name of a served model, a string", json_schema_extra={"format": "model-name"})
seed = _always("a 64-bit integer", ge=-MAX_SEED - 1, le=MAX_SEED)
boolean = _always("true or false")
label = _always(f"a string of at most {MAX_LABEL_CHARS} characters", max_length=MAX_LABEL_CHARS)
text = _always("a string")
regex = _always("a regular expression, as Rust's regex library reads it", json_schema_extra={"format": "regex"})
free_object = _always("an object")


def refuse(message: str) -> PydanticCustomError:
    """An error whose message is already complete. Braces are for pydantic, so they are passed as context."""
    return PydanticCustomError("refused", "{message}", {"message": message})


def only(*allowed: Any) -> Checked:
    """A field of other servers of which just these values are served; null always is."""
    words = " or ".join(json.dumps(value) for value in allowed)

    def check(value: Any) -> Any:
        if not any(_same(value, each) for each in allowed):
            raise refuse(f"is supported only as {words}")
        return value

    return Checked(check, {"enum": list(allowed)})


def _same(value: Any, allowed: Any) -> bool:
    """1.0 is 1, as in JSON Schema; true is not."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _refuse_any(value: Any) -> Any:
    raise refuse("is not supported by this server: leave it out")


Refused = Checked(_refuse_any, NULL)
Unread = Checked(lambda value: None, {}, nullable=False)
"""What others keep for themselves in a request, and no answer would be another without: anything, which is dropped."""


class Marked(Strict):
    """What clients and other servers write beside anything that is sent again and again: up to where a server is to
    cache, and what was known of it when it was part of an answer (LiteLLM's, Gemini's field)."""

    cache_control: Annotated[Any, Unread] = None
    prompt_cache_breakpoint: Annotated[Any, Unread] = None
    provider_specific_fields: Annotated[Any, Unread] = None
    extra_content: Annotated[Any, Unread] = None


def _parse_stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS for stop in stops)
    ):
        raise refuse(f"must be a string or up to {MAX_STOPS} strings, each of 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
Stops = Checked(_parse_stops, {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]})


def parse_token_ids(value: Any) -> tuple[int, ...]:
    tokens = tuple(map(whole, value)) if isinstance(value, list) else None
    if tokens is None or not all(type(token) is int and token >= 0 for token in tokens):
        raise refuse("must be a list of token ids (integers of at least 0)")
    return tokens


def _parse_some_token_ids(value: Any) -> tuple[int, ...]:
    if value == []:
        raise refuse("must name at least one token id")
    return parse_token_ids(value)


def parse_count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise refuse("must be an integer of at least 1")
    return value


TokenIds = Checked(parse_token_ids, {"type": "array", "items": TOKEN})
SomeTokenIds = Checked(_parse_some_token_ids, {"type": "array", "items": TOKEN, "minItems": 1})


def texts(least: int, most: int, longest: int) -> Checked:
    """A list of `least` to `most` strings of 1 to `longest` characters."""

    def check(value: Any) -> tuple[str, ...]:
        fine = isinstance(value, list) and least <= len(value) <= most
        if not fine or not all(isinstance(each, str) and 1 <= len(each) <= longest for each in value):
            raise refuse(f"must be a list of {least} to {most} strings, each of 1 to {longest} characters")
        return tuple(value)

    items = {"type": "string", "minLength": 1, "maxLength": longest}
    return Checked(check, {"type": "array", "items": items, "minItems": least, "maxItems": most})


def _parse_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    words = "must be an object of token ids (as strings) to numbers from -100 to 100"
    if not isinstance(value, dict):
        raise refuse(words)
    bias = {}
    for key, amount in value.items():
        # isascii: "²".isdigit() is true too. The length keeps int() away from absurdly long numbers.
        if not (key.isascii() and key.isdigit() and len(key) <= 18):
            raise refuse(f"{words}; {key[:40]!r} is not a token id")
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not -100 <= amount <= 100:
            raise refuse(f"{words}; that of {key!r} is {amount!r}"[:200])
        bias[int(key)] = float(amount)  # by number: "5" and "05" are one token
    return tuple(bias.items())


LogitBias = Checked(
    _parse_logit_bias,
    {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]+$", "maxLength": 18, "format": "token-id"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
)


# From the bytes of a body to a request, or to one clear line that names the field at fault.


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
