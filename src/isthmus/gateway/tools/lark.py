"""Grammars of calls, in the Lark form that llguidance reads: what an answer must be where a call is forced, or where
calls must follow their schemas.

They are of the format that the model writes by itself, so the parser that reads its own calls reads these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.gateway.tools.schemas import bare, required_of

MAX_CALLS = 16
"""In one answer, where there may be several: a small model that is free to go on does."""

# As chat templates write JSON, which is what the model has read of calls.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "if", "not", "patternProperties", "unevaluatedProperties")

TokenOf = Callable[[str], int | None]
"""The id of a text that is a special token; such a token is never written as text."""


TEXT = "TEXT"


@dataclass(frozen=True)
class Asked:
    """What an answer is to be. `several`: there may be more than one call; `forced`: there is at least one, and nothing
    else. `token_of`: as below."""

    several: bool
    forced: bool
    token_of: TokenOf


class UnfollowableError(Exception):
    """The schema of a function's parameters says what no grammar of this format can. Says which and why."""

    def __init__(self, function: str, reason: str) -> None:
        super().__init__(reason)
        self.function = function


class Rules:
    """Lark text, rule by rule."""

    def __init__(self, token_of: TokenOf) -> None:
        self._lines: list[str] = []
        self._json: dict[str, str] = {}  # the rules of schemas
        self._token_of = token_of

    def mark(self, text: str) -> str:
        """A text that may be a special token."""
        token = self._token_of(text)
        return literal(text) if token is None else f"<[{token}]>"

    def text_until(self, mark: str) -> str:
        """Any text up to the first of these marks, and that."""
        if self._token_of(mark) is not None:
            return f"{TEXT} {self.mark(mark)}"
        return self.rule(f"{TEXT} {literal(mark)}", options="[lazy]")

    def rule(self, expression: str, *, options: str = "") -> str:
        """A rule of its own; its name."""
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}{options}: {expression}")
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON that follows `schema`, spaced as templates space it. Equal schemas share a rule."""
        spaced = {**bare(schema), "x-guidance": _SPACING}
        expression = f"%json {json.dumps(spaced, separators=(',', ':'))}"
        if expression not in self._json:
            self._json[expression] = self.rule(expression)
        return self._json[expression]

    def any_of(self, expressions: Sequence[str]) -> str:
        return self.rule(" | ".join(expressions))

    def text(self, start: str) -> str:
        return "\n".join((f"start: {start}", *self._lines, f"{TEXT}: /(?s:.*)/"))


def literal(text: str) -> str:
    """JSON's escapes are Lark's, which takes some signs only so."""
    return json.dumps(text)


def repeated(call: str, separator: str, *, several: bool) -> str:
    between = f"{literal(separator)} " if separator else ""
    return f"{call} ({between}{call}){{0,{MAX_CALLS - 1}}}" if several else call


def answer(rules: Rules, mark: str, call: str, separator: str, asked: Asked) -> str:
    """Lark of a whole answer: calls, each `mark` and then `call`, with text around them where they are not forced."""
    if asked.forced:
        return rules.text(repeated(rules.rule(f"{rules.mark(mark)} {call}"), separator, several=asked.several))
    marked = f"{rules.text_until(mark)} {call}"
    return rules.text(f"({marked}){{0,{MAX_CALLS}}} {TEXT}" if asked.several else f"{marked} | {TEXT}")


def parameters(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's parameters as that of an object without properties that it does not name.

    A schema that says nothing of other properties allows any; a model that may invent some does, and would not end.
    """
    return {**_closed(schema or {"properties": {}}), "type": "object"}


def parameters_alone(schema: Mapping[str, Any]) -> str:
    """Lark for the arguments of one function, as all formats but one write them."""
    rules = Rules(lambda text: None)
    return rules.text(rules.json(parameters(schema)))


def _closed(schema: Any) -> Any:
    """Where alternatives or references are combined, another part may name them: those stay as they are."""
    if not isinstance(schema, Mapping) or any(word in schema for word in _COMBINING):
        return schema
    closed = dict(schema)
    if isinstance(schema.get("properties"), Mapping):
        closed["properties"] = {name: _closed(inner) for name, inner in schema["properties"].items()}
        if "additionalProperties" not in schema:
            closed["properties"] = {**closed["properties"], **_only_required(schema)}
            closed["additionalProperties"] = False
    if "items" in schema:
        closed["items"] = _closed(schema["items"])
    return closed


def _only_required(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Properties that must be there, and of which nothing else is said."""
    return {name: {} for name in required_of(schema) if name not in schema["properties"]}


def json_calls(rules: Rules, schemas: Mapping[str, Mapping[str, Any]], arguments: str) -> str:
    """`{"name": ..., "arguments": ...}` of any of the functions; `arguments`: what those are called."""
    calls = []
    for name, schema in schemas.items():
        head = literal(f'{{"name": {json.dumps(name)}, "{arguments}": ')
        calls.append(f"{head} {rules.json(parameters(schema))} {literal('}')}")
    return rules.any_of(calls)
