"""The OpenAPI document, generated from the request models and the reply structures. Token ids, lengths and the
model's name get the bounds of the served model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import TypeAdapter

import isthmus
from isthmus.core.types import ModelCard, Reuse
from isthmus.live.gateway.headers import HEADERS, REUSE
from isthmus.live.gateway.http import ProblemBody

REF = "#/components/schemas/"
JSON = "application/json"
EVENTS = "text/event-stream"
_REFUSALS = {
    "400": "The request cannot be served as it is; the error names the field.",
    "404": "No such model.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "429": "Overloaded; try again after as many seconds as Retry-After says.",
    "502": "A node failed.",
    "503": "No node can serve now.",
}

Schema = dict[str, Any]


@dataclass(frozen=True)
class Operation:
    """One route. `body`: a model or union of models; `reply`: the structure of its JSON, or text of type `media`;
    `streams`: also answers with server-sent events; `open`: never needs a key."""

    path: str
    endpoint: Any
    summary: str
    body: Any = None
    reply: Any = None
    media: str = ""
    streams: bool = False
    open: bool = False

    @property
    def method(self) -> str:
        return "GET" if self.body is None else "POST"


def document(operations: Sequence[Operation], card: ModelCard, *, keys: bool) -> bytes:
    """The document as JSON. `keys`: requests need one, except on open routes."""
    bodies, components = _bodies([each.body for each in operations if each.body is not None])
    kinds = [ProblemBody, *(each.reply for each in operations if each.reply is not None)]
    replies, written = msgspec.json.schema_components(kinds, ref_template=REF + "{name}")
    assert not components.keys() & written.keys(), "one name, one schema"
    problem, reply_of = replies[0], dict(zip(map(id, kinds), replies, strict=True))
    paths: dict[str, Schema] = {}
    for each in operations:
        described = _described(each, bodies.get(repr(each.body)), reply_of.get(id(each.reply)), problem)
        if keys and not each.open:
            described["security"] = [{"key": []}]
            described["responses"]["401"] = _answer("No key, or one that is not known.", {JSON: problem})
        paths.setdefault(each.path.replace(":path}", "}"), {})[each.method.lower()] = described
    found: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "Isthmus", "version": isthmus.__version__},
        "paths": paths,
        "components": {"schemas": components | written},
    }
    if keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    _bound(found, card)
    return msgspec.json.encode(found)


def _bodies(kinds: Sequence[Any]) -> tuple[dict[str, Schema], dict[str, Schema]]:
    """A reference for each kind, by its `repr`, and all schemas referred to, by name."""
    inputs = [(repr(kind), "validation", TypeAdapter(kind)) for kind in kinds]
    references, schema = TypeAdapter.json_schemas(inputs, ref_template=REF + "{model}")  # type: ignore[arg-type]
    return {str(key): found for (key, _), found in references.items()}, schema.get("$defs", {})


def _described(operation: Operation, body: Schema | None, reply: Schema | None, problem: Schema) -> Schema:
    content = {JSON: reply} if reply is not None else {}
    if operation.media:
        content = {operation.media: {"type": "string"}}
    if operation.streams:
        content[EVENTS] = {}  # no schema: tools disagree whether it describes one event or the whole text
    found: Schema = {"summary": operation.summary, "responses": {"200": _answer("The answer.", content)}}
    if body is not None:
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
        codes = _REFUSALS if operation.streams else ("400", "404", "413", "415")
        found["responses"] |= {code: _answer(_REFUSALS[code], {JSON: problem}) for code in codes}
    if operation.streams:
        found["parameters"] = _headers()
    if "{name" in operation.path:
        name = {"type": "string", "format": "model-name"}
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": name}]
        found["responses"]["404"] = _answer(_REFUSALS["404"], {JSON: problem})
    if operation.path == "/health":
        found["responses"]["503"] = _answer(_REFUSALS["503"], {})
    return found


def _answer(text: str, content: dict[str, Schema]) -> Schema:
    found: Schema = {"description": text}
    if content:
        found["content"] = {media: {"schema": schema} for media, schema in content.items()}
    return found


def _headers() -> list[Schema]:
    """Parameters for the headers of a request's terms."""
    schemas: dict[str, Schema] = {
        name: {"type": "integer", "minimum": low, "maximum": high} for name, (low, high) in HEADERS.items()
    }
    schemas[REUSE] = {"type": "string", "format": "reuse", "enum": list(Reuse)}
    return [{"name": name, "in": "header", "schema": schema} for name, schema in schemas.items()]


def _bound(node: Any, card: ModelCard) -> None:
    """Sets the served model's bounds where a schema's `format` asks for them, in place."""
    if isinstance(node, list):
        for each in node:
            _bound(each, card)
    if not isinstance(node, dict):
        return
    match node.get("format"):
        case "token-id" if node.get("type") == "integer":
            node["maximum"] = card.vocab_size - 1
        case "token-id":
            node["pattern"] = f"^0*({_decimals(str(card.vocab_size - 1))})$"
        case "num-tokens":
            node["maximum"] = card.max_length
        case "reuse" if card.no_reuse:
            node["enum"] = [Reuse.EXACT]
        case "model-name":
            node["enum"] = [*card.names, *([] if node.get("type") == "string" else [None])]
    for each in node.values():
        _bound(each, card)


def _decimals(largest: str) -> str:
    """A regular expression for the decimal numbers up to `largest`, without leading zeros."""
    last = len(largest) - 1
    smaller = [
        f"{largest[:at]}[0-{int(digit) - 1}][0-9]{{{last - at}}}"
        for at, digit in enumerate(largest)
        if digit != "0"
    ]
    shorter = [f"[0-9]{{1,{last}}}"] if last else []
    return "|".join([*shorter, *smaller, largest])
