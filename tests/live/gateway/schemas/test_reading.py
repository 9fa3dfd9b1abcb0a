"""What a schema constrains: annotations are none, and what would lead the library astray is settled."""

from __future__ import annotations

import contextlib
import json
import random
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.live.gateway.schemas.grammar import FREE, Spacing, schema_lark
from isthmus.live.gateway.schemas.reading import (
    COUNTS,
    LISTS,
    MAPS,
    NUMBERS,
    SINGLE,
    SchemaError,
    is_exact,
)
from isthmus.live.gateway.tools.lark import parameters

from .test_grammar import drawn, follows, matcher

TOLD = {
    "title": 2**70, "description": [1e300], "default": 2**64, "examples": [1234567890123456789], "$comment": "c",
    "deprecated": True, "readOnly": True, "nullable": True, "example": -(2**63), "xml": {}, "discriminator": {},
    "externalDocs": {"a": 1}, "contentEncoding": "base64", "contentMediaType": "x/y", "x-own": {"const": 2**80},
}  # fmt: skip
FIELD: Any = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 5}},
    "required": ["title"],
}


def test_what_only_tells_constrains_nothing() -> None:
    def schema(told: dict[str, Any]) -> Any:
        field = {**FIELD, "properties": {"title": FIELD["properties"]["title"] | told}} | told
        return {"anyOf": [{"type": "array", "items": {"$ref": "#/components/F"}}, {"enum": [TOLD]}],
                "components": {"F": field}} | told  # fmt: skip

    assert schema_lark(schema(TOLD), FREE) == schema_lark(schema({}), FREE)


TABLE = json.loads((Path(__file__).parent.parent / "tables" / "schemas.json").read_text())


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["rule"])
def test_table(row: dict[str, Any]) -> None:
    """tables/schemas.json: texts that a schema, or one of a function's `parameters`, allows (`right`) and does not, or
    words of its refusal: ours (`refused`), or that of the library's own (`library`)."""
    schema = parameters(row["parameters"]) if "parameters" in row else row["schema"]
    if "refused" in row:
        with pytest.raises(SchemaError, match=re.escape(row["refused"])):
            schema_lark(schema, FREE)
        return
    lark = schema_lark(schema, FREE)
    if "library" in row:
        assert matcher(lark).is_error() and row["library"] in matcher(lark).get_error()
    else:
        assert [text for text in row["right"] + row["wrong"] if follows(lark, text)] == row["right"]


NONE = dict.fromkeys(["required", "enum", "pattern", "properties", "items", "minimum", "$ref", "anyOf"])


@pytest.mark.parametrize(
    "words",
    [NONE, {"uniqueItems": False}, {"unevaluatedProperties": True}]
    + [{"propertyNames": names} for names in (True, {"title": "x"}, {"type": "string", "description": "x"})],
    ids=str,
)
def test_words_that_constrain_nothing(words: dict[str, Any]) -> None:
    """As Go and Java write what is not there, and zod writes records."""

    def lark(schema: dict[str, Any]) -> str:
        return schema_lark({"type": "object", "additionalProperties": schema}, FREE)

    for schema in ({"type": "string"}, {"type": "integer", "maximum": 2**63 - 1}, {"const": None}):
        assert lark(words | schema) == lark(schema)


WORDS = sorted(
    MAPS | LISTS | SINGLE | NUMBERS | COUNTS | {"type", "const", "enum", "$ref", "required", "pattern"}
)


@pytest.mark.parametrize("seed", range(8))
def test_nothing_comes_after_the_last_name_that_there_can_be(seed: int) -> None:
    """The library alone goes on, and finds nothing that may."""
    schema = {
        "type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False,
        "patternProperties": {"^a$": {"type": "integer"}},
    }  # fmt: skip
    assert drawn(schema_lark(schema, Spacing()), random.Random(seed)) == '{"a":1}'


JUNK = st.recursive(
    st.sampled_from(
        [None, True, "a", "#", "object", "^a$", 0, 2.5, 2**64, -1, [], {}, float("inf"), Decimal("1e99")]
    ),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b", *WORDS]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(WORDS), JUNK, max_size=5))
def test_whatever_a_schema_is_it_is_read_or_refused(schema: dict[str, Any]) -> None:
    with contextlib.suppress(SchemaError):
        schema_lark(schema, FREE)


@pytest.mark.parametrize(
    ("number", "exact"),
    [
        (2**53 - 1, True), (2**53, False), (-(2**63), False), (0.1, True), (1e22, False), (Decimal("0.1"), True),
        (Decimal("0.12345678901234567890"), False), (float("inf"), False), (True, True), ("x", True),
    ],
)  # fmt: skip
def test_numbers_that_the_library_keeps(number: Any, exact: bool) -> None:
    assert is_exact(number) == exact
