"""Random JSON schemas that answers of random tokens can finish: nothing in them is without an end."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
from llguidance import LLMatcher


def schema(draw: random.Random, depth: int = 2) -> dict[str, Any]:
    """`depth`: how far arrays and objects may nest."""
    kinds = ["integer", "boolean", "null", "string", "enum", "number"]
    kind = draw.choice(kinds + ["array", "object"] * 3 * (depth > 0))
    match kind:
        case "integer":
            return {"type": "integer", "minimum": -draw.randrange(99), "maximum": draw.randrange(9_999)}
        case "number":
            return {"enum": [draw.randrange(-99, 99) / 4 for _ in range(3)]}
        case "string":
            return {"type": "string", "maxLength": draw.randrange(12)}
        case "enum":
            return {"enum": [draw.choice(["é", "b c", 7, None, False, ["x", 1], '"']) for _ in range(3)]}
        case "array":
            return {"type": "array", "items": schema(draw, depth - 1), "maxItems": draw.randrange(4)}
        case "object":
            return object_schema(draw, depth)
    return {"type": kind}


def object_schema(draw: random.Random, depth: int = 2) -> dict[str, Any]:
    names = draw.sample(["id", "name", "a b", "ü", 'quo"te', "kind"], draw.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: schema(draw, depth - 1) for name in names},
        "required": [name for name in names if draw.random() < 0.7],
        "additionalProperties": False,
    }


def breaking() -> dict[str, Any]:
    """A schema over which the process that compiles it dies: the library compares all patterns with each other."""
    return {"type": "object", "patternProperties": {f"^{name}$": {} for name in range(400)}}


def grammar(schema: dict[str, Any]) -> str:
    """Without the whitespace that never has to end."""
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})


def validate(text: str | bytes, schema: dict[str, Any]) -> None:
    jsonschema.validate(json.loads(text), schema)


NUMBERS = [0, 1, -1, 3, 10, -7, 0.5, -2.5, 100, 2**53 + 1, 2**63, 2**64 - 1, -(2**63), 1e22]
VALUES = [1, "a", None, True, 2.5, [1], {"a": 1}, "", [], {}, 'é"', 2**64 - 1, [2**60 + 1]]


def wild(draw: random.Random) -> dict[str, Any]:
    """A schema of whatever JSON Schema has, much of which contradicts itself or cannot be followed."""
    return {"$defs": {"A": _wild(draw, 1), "B": _wild(draw, 1)}, "anyOf": [_wild(draw, 2)]}


def _wild(draw: random.Random, depth: int) -> Any:
    def inner() -> Any:
        return _wild(draw, depth - 1)

    def maybe(share: float, **words: Any) -> dict[str, Any]:
        return words if draw.random() < share else {}

    simple = ["number", "string", "value", "any"]
    match draw.choice(simple + ["array", "object", "object", "combined", "ref", "mixed"] * (depth > 0)):
        case "number":
            words = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
            bounds = {word: draw.choice(NUMBERS) for word in words if draw.random() < 0.3}
            return {
                "type": draw.choice(["integer", "number"]),
                **bounds,
                **maybe(0.2, multipleOf=draw.choice([2, 0.5])),
            }
        case "string":
            pattern = draw.choice(["^a+$", "b", "x$", "."])
            return {
                "type": "string",
                "maxLength": draw.randrange(6),
                **maybe(0.2, pattern=pattern),
                **maybe(0.2, format="x"),
            }
        case "value":
            return (
                {"enum": draw.choices(VALUES, k=2)} if draw.random() < 0.5 else {"const": draw.choice(VALUES)}
            )
        case "any":
            return draw.choice([{}, True, False, {"type": ["string", "null"]}])
        case "array":
            counts = maybe(0.3, minItems=draw.randrange(3)) | maybe(0.5, maxItems=draw.randrange(4))
            return {"type": "array", "items": inner(), **maybe(0.3, prefixItems=[inner()]), **counts}
        case "object":
            patterns = {draw.choice(["^a", "b$", "^a$", "^(a|b)$", ".", "^(ab|c)$"]): inner()}
            return {
                "type": "object",
                "properties": {name: inner() for name in draw.sample(["a", "b", "ab", "c"], draw.randrange(4))},
                "required": draw.sample(["a", "b", "z"], draw.randrange(3)),
                **maybe(0.5, additionalProperties=draw.choice([False, inner()])),
                **maybe(0.4, patternProperties=patterns),
                **maybe(0.1, **{draw.choice(["propertyNames", "dependentRequired", "not"]): {}}),
            }
        case "combined":
            return {draw.choice(["anyOf", "oneOf", "allOf"]): [inner() for _ in range(draw.randrange(1, 3))]}
        case "ref":
            return {"$ref": draw.choice(["#", "#/$defs/A", "#/$defs/B"])}
    parts = [part for part in (inner(), inner()) if isinstance(part, dict)]
    return {word: part for each in parts for word, part in each.items()}
