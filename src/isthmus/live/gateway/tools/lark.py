"""Lark grammars of calls, for llguidance, in the formats that the parsers read; and the JSON types that a function's
parameters may have."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from isthmus.live.gateway.schemas.grammar import LarkRules, Spacing, literal
from isthmus.live.gateway.schemas.reading import kind_of
from isthmus.live.gateway.schemas.reading import kinds_of as types_of

Schemas = Mapping[str, Mapping[str, Any]]
"""The schema of each function's parameters, by its name."""

STRING = frozenset({"string"})
MAX_DEPTH = 16
"""Length of chains of references, which may be circular."""
MAX_PARTS = 256
"""Parts of one schema that are searched for the types of a value."""


def resolved(schema: Any, root: Any, depth: int = 0) -> Mapping[str, Any]:
    """`schema`, or its `$ref` within `root`; {} for anything but an object schema."""
    if not isinstance(schema, Mapping):
        return {}
    reference = schema.get("$ref")
    if not isinstance(reference, str) or depth == MAX_DEPTH:
        return schema
    found = root
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return resolved(found, root, depth + 1)


def properties_of(schema: Any) -> Mapping[str, Any]:
    """Schemas of an object's properties, by name."""
    properties = resolved(schema, schema).get("properties")
    return properties if isinstance(properties, Mapping) else {}


def required_of(schema: Mapping[str, Any]) -> list[str]:
    """Names of an object's required properties."""
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def kinds_of(schema: Any, root: Any) -> frozenset[str]:
    """The JSON types that a value may have; string where the schema says none."""
    kinds: set[str] = set()
    seen: list[Any] = []  # references may lead in circles
    waiting = [schema]
    while waiting:
        found = resolved(waiting.pop(), root)
        if any(found is each for each in seen):
            continue
        seen.append(found)
        own = _own_kinds(found)
        kinds |= own
        if not own:
            branches = (found.get(word) for word in ("anyOf", "oneOf", "allOf"))
            waiting += [each for branch in branches if isinstance(branch, list) for each in branch]
        if len(seen) == MAX_PARTS:
            break
    return frozenset(kinds) or STRING


def _own_kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    if isinstance(schema.get("type"), str | list):
        return types_of(schema)
    if isinstance(schema.get("enum"), list):
        return frozenset(map(kind_of, schema["enum"]))
    return frozenset({kind_of(schema["const"])}) if "const" in schema else frozenset()


def as_json(text: str, kinds: frozenset[str]) -> str:
    """`text` as JSON of one of `kinds`, or as a string where it is none of them."""
    written = text.strip()
    try:
        value = _LITERALS[written] if written in _LITERALS else json.loads(written, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = kind_of(value)
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    if "string" in kinds and (kind == "string" or not fits):
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(value) if written in _LITERALS else written


_LITERALS = {"True": True, "False": False, "None": None}
"""Python's literals, as a template may have shown values of past calls."""


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


MAX_CALLS = 16
"""Calls in one answer: a small model that is free to go on would."""

# As chat templates write JSON.
_SPACING = Spacing("", ", ", ": ")
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "if", "not", "patternProperties", "unevaluatedProperties")
ANY_ARGUMENTS = {"type": "object", "additionalProperties": True}
"""For a function whose schema is not followed."""

TokenOf = Callable[[str], int | None]
"""The id of a text that is a special token; such a token is never written as text."""


TEXT = "TEXT"


@dataclass(frozen=True)
class AnswerForm:
    """The form of an answer. `several`: more than one call is allowed; `forced`: it must be a call; `otherwise`: the
    rule of an alternative to a forced call, "" for none."""

    several: bool
    forced: bool
    token_of: TokenOf
    otherwise: str = ""


class CallRules(LarkRules):
    """Lark rules of calls; equal schemas share one."""

    def __init__(self, asked: AnswerForm, spacing: Spacing = _SPACING) -> None:
        super().__init__(spacing)
        self._asked = asked

    def mark(self, text: str) -> str:
        """A text that may be a special token."""
        token = self._asked.token_of(text)
        return literal(text) if token is None else f"<[{token}]>"

    def text_until(self, mark: str) -> str:
        """Any text up to the first of these marks, and the mark."""
        if self._asked.token_of(mark) is not None:
            return f"{TEXT} {self.mark(mark)}"
        return self.rule(f"{TEXT} {literal(mark)}", options="[lazy]")

    def text(self, start: str) -> str:
        start = f"({start}) | {self._asked.otherwise}" if self._asked.otherwise else start
        return "\n".join((f"start: {start}", *self.lines(), f"{TEXT}: /(?s:.*)/"))


def repeated(call: str, separator: str, *, several: bool) -> str:
    between = f"{literal(separator)} " if separator else ""
    return f"{call} ({between}{call}){{0,{MAX_CALLS - 1}}}" if several else call


def answer(rules: CallRules, mark: str, call: str, separator: str, asked: AnswerForm) -> str:
    """Lark of a whole answer: calls, each `mark` and then `call`, with text around them where they are not forced."""
    if asked.forced:
        return rules.text(repeated(rules.rule(f"{rules.mark(mark)} {call}"), separator, several=asked.several))
    marked = f"{rules.text_until(mark)} {call}"
    return rules.text(f"({marked}){{0,{MAX_CALLS}}} {TEXT}" if asked.several else f"{marked} | {TEXT}")


def parameters(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's parameters, without properties that it does not name.

    A schema that says nothing of other properties allows any, and a model that may invent some would not end.
    """
    return {**_closed(schema or {"properties": {}}), "type": "object"}


def _closed(schema: Any) -> Any:
    """Schemas that combine others stay as they are, since another part may name further properties."""
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
    """Properties that are required and not described."""
    return {name: {} for name in required_of(schema) if name not in schema["properties"]}


def json_calls(rules: CallRules, schemas: Mapping[str, Mapping[str, Any]], arguments: str) -> str:
    """`{"name": ..., "arguments": ...}` of any of the functions; `arguments`: the key of the latter."""
    calls = []
    for name, schema in schemas.items():
        pairs = (
            rules.pair("name", literal(json.dumps(name))),
            rules.pair(arguments, rules.json(parameters(schema))),
        )
        calls.append(rules.bracketed("{}", f" {rules.comma} ".join(pairs)))
    return rules.any_of(calls)
