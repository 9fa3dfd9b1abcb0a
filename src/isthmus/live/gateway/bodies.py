"""From the bytes of a body to a request: what they are, how deep they nest, and what they say."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

import pydantic
from pydantic import TypeAdapter

from isthmus.core.errors import RequestError
from isthmus.live.gateway.problems import UnsupportedMediaError
from isthmus.live.gateway.refusals import refusal

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
            raise UnsupportedMediaError(coding)
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
