"""What a JSON schema says of a value, as far as formats need to know it: which kinds it may be of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from isthmus.live.gateway.schemas.reading import kind_of

Schemas = Mapping[str, Mapping[str, Any]]
"""Of the parameters of each function, by its name."""

STRING = frozenset({"string"})
MAX_DEPTH = 16
"""Of references to references, which may be circular."""
MAX_PARTS = 256
"""Of one schema that are looked at, to see what a value may be."""


def resolved(schema: Any, root: Any, depth: int = 0) -> Mapping[str, Any]:
    """`schema`, or what it refers to within `root`; {} if that is no schema of an object's form."""
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
    """Names of the properties that an object must have."""
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def kinds_of(schema: Any, root: Any) -> frozenset[str]:
    """The JSON types a value may have; just a string where the schema says nothing of it."""
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
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(kind for kind in named if isinstance(kind, str))
    if isinstance(schema.get("enum"), list):
        return frozenset(map(kind_of, schema["enum"]))
    return frozenset({kind_of(schema["const"])}) if "const" in schema else frozenset()


def as_json(text: str, kinds: frozenset[str]) -> str:
    """`text` as JSON of one of `kinds`; as a string where it is none of the others."""
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
"""As a template may have shown the model values of past calls."""


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")
