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
