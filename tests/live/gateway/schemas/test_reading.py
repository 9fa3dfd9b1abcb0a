"""What a schema constrains: annotations are none, and what would lead the library astray is settled."""

from __future__ import annotations

import contextlib
import json
import random
from decimal import Decimal
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
    ReadSchema,
    SchemaError,
    is_exact,
)

from .test_grammar import drawn, follows, matcher

TOLD = {
    "title": 2**70, "description": [1e300], "default": 2**64, "examples": [1234567890123456789], "$comment": "c",
    "deprecated": True, "readOnly": True, "nullable": True, "example": -(2**63), "xml": {}, "discriminator": {},
    "externalDocs": {"a": 1}, "contentEncoding": "base64", "contentMediaType": "x/y", "x-own": {"const": 2**80},
}  # fmt: skip
ENDLESS_E = {"type": "object", "properties": {"a": {"$ref": "#/$defs/E"}}, "required": ["a"]}
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


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        *(
            ({"type": "string", "maxLength": 3, "format": form}, ['"abc"'], ['"abcd"'])
            for form in ("password", "regex", "binary", "textarea", "idn-email", "x", 5, None)
        ),
        *(
            ({"type": ["integer", "null"], "format": form}, ["5"], ["5.5"])
            for form in ("int32", "int64", "date", "double")
        ),
        ({"type": "string", "format": "date"}, ['"2026-11-26"'], ['"abc"']),
        ({"type": "string", "format": "uuid"}, [f'"{"0" * 8}{"-0000" * 3}-{"0" * 12}"'], ['"abc"']),
        ({"type": "string", "format": "ipv4"}, ['"1.2.3.4"'], ['"abc"']),
        ({"type": "string", "minLength": 2.0, "maxLength": Decimal("3.0")}, ['"ab"'], ['"a"', '"abcd"']),
        ({"type": "array", "maxItems": 2**64, "items": {"type": "string", "maxLength": 1e300}}, ['["ab"]'], []),
        ({"type": "object", "properties": {"a": {}}, "patternProperties": {".*": False}}, ["{}"], ['{"b": 1}']),
        ({"type": "object", "properties": {"a": {"type": "string"}}}, ['{"b": "\\n"}'], ['{"\\u0061": 1}']),
        (
            {"type": "object", "properties": {"a": {"const": "\x01"}}, "required": ["a"]},
            ['{"a": "\\u0001"}'],
            ['{"a": "\\u0002"}'],
        ),
        (
            {"type": "object", "properties": {"a": {}}, "patternProperties": {r"^\p{L}$": {"type": "null"}}},
            ['{"a": null, "b": null}'],
            ['{"b": 1}'],
        ),
        (
            {"type": "object", "properties": {"a": {"$ref": "#/$defs/E"}, "b": {}}, "$defs": {"E": ENDLESS_E}},
            ['{"b": 1}'],
            ['{"a": 1}', '{"a": {}}'],
        ),
        (
            {"type": ["array", "object"], "minProperties": 1, "additionalProperties": {"$ref": "#"}},
            ['{"a": []}'],
            ["{}"],
        ),
        (
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
            ['{"a": {"a": {}}}'],
            ['{"b": {}}'],
        ),
    ],
)
def test_schemas_that_are_followed(schema: Any, right: list[str], wrong: list[str]) -> None:
    """Formats that are not known and formats of no string constrain nothing; counts may be fractions; a name spelled
    with escapes evades nothing; patterns that Python does not read are the library's; a part without an end is left
    out."""
    lark = schema_lark(schema, FREE)
    assert [text for text in (*right, *wrong) if follows(lark, text)] == right


@pytest.mark.parametrize("draft", ["2020-12", "draft-07", "draft-04", None])
@pytest.mark.parametrize(
    ("word", "part"),
    [
        *((word, {}) for word in ("not", "if", "dependentRequired", "contains")),
        ("propertyNames", {"enum": ["a"]}),
        ("unevaluatedProperties", False),
        ("uniqueItems", True),
    ],
)
def test_what_constrains_and_is_not_followed_is_refused_in_every_draft(
    word: str, part: Any, draft: str | None
) -> None:
    schema = {word: part} | ({"$schema": f"http://json-schema.org/{draft}/schema#"} if draft else {})
    found = matcher(schema_lark(schema, FREE))
    assert found.is_error() and f'"{word}"' in found.get_error()


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


@pytest.mark.parametrize("last", [1, 2**60 + 1])
@pytest.mark.parametrize(
    "words",
    [
        {"items": ["FIRST", {"type": "null"}], "additionalItems": "LAST"},
        {"prefixItems": ["FIRST", {"type": "null"}], "items": "LAST", "additionalItems": False},
    ],
    ids=str,
)
def test_items_by_place_in_every_draft(words: Any, last: int) -> None:
    text = json.dumps(words).replace('"FIRST"', '{"enum": ["a"]}').replace('"LAST"', f'{{"const": {last}}}')
    lark = schema_lark({"type": "array"} | json.loads(text), FREE)
    assert all(follows(lark, right) for right in ('["a"]', '["a", null]', f'["a", null, {last}, {last}]'))
    assert not any(follows(lark, wrong) for wrong in ("[1]", '["a", "a"]', '["a", null, "a"]'))


@pytest.mark.parametrize("required", [[], ["kind"]], ids=str)
@pytest.mark.parametrize("most", [9, 2**63 - 1])
def test_a_union_that_a_property_discriminates(most: int, required: list[str]) -> None:
    """Of pydantic, where the property often has a default; of both, an object without it would be either."""
    number = {"type": "integer", "minimum": 0, "maximum": most}
    kinds = {
        name: {
            "type": "object",
            "properties": {"kind": {"const": name, "default": name, "type": "string"}, "n": number},
            "required": [*required, "n"],
        }
        for name in ("cat", "dog")
    }
    pet = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in kinds], "discriminator": {"propertyName": "kind"}}
    lark = schema_lark({"type": "array", "items": pet, "$defs": kinds}, FREE)
    assert follows(lark, f'[{{"kind": "cat", "n": 5}}, {{"kind": "dog", "n": {most}}}]')
    assert not any(follows(lark, wrong) for wrong in ('[{"n": 5}]', '[{"kind": "bird", "n": 5}]'))


@pytest.mark.parametrize(
    "reference",
    ["#/$defs/a b", "#/$defs/a%20b", "#/properties/x~1y/anyOf/1", "#here", "http://a/b#/$defs/a b", "in"],
)
def test_references_of_all_forms(reference: str) -> None:
    named = {"type": "integer", "maximum": 5, "minimum": 4, "$anchor": "here", "$id": "in"}
    schema = {
        "$id": "http://a/b", "type": "array", "items": {"$ref": reference},
        "$defs": {"a b": named}, "properties": {"x/y": {"anyOf": [{}, named]}},
    }  # fmt: skip
    lark = schema_lark(schema, FREE)
    assert follows(lark, "[4, 5]") and not follows(lark, "[6]")


@pytest.mark.parametrize("reference", ["#/nowhere", "#/$defs/0", "#nowhere", "http://x/y", "#/type"])
def test_a_reference_to_nothing(reference: str) -> None:
    with pytest.raises(SchemaError, match="there is no such schema"):
        ReadSchema({"type": "null", "$ref": reference, "$defs": {}})


WORDS = sorted(
    MAPS | LISTS | SINGLE | NUMBERS | COUNTS | {"type", "const", "enum", "$ref", "required", "pattern"}
)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}]},
        {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
        {"type": "object", "required": ["a"], "patternProperties": {"^a": {"$ref": "#"}}},
        {
            "type": "object",
            "minProperties": 1,
            "additionalProperties": False,
            "properties": {"a": {"$ref": "#"}},
        },
        {"$ref": "#/$defs/A", "$defs": {"A": {"allOf": [{"$ref": "#/$defs/B"}]}, "B": {"$ref": "#/$defs/A"}}},
    ],
)
def test_a_schema_that_no_finite_value_fits(schema: Any) -> None:
    with pytest.raises(SchemaError, match="requires itself"):
        ReadSchema(schema)


@pytest.mark.parametrize("patterns", [["^score$"], ["^(score|tag)$"], ["^(score)$", "^tag$"]])
def test_a_pattern_of_names_that_are_properties(patterns: list[str]) -> None:
    """The library alone dies after the last property that the pattern fits."""
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {
        "type": "object", "properties": {"score": digit}, "required": ["score", "tag"],
        "patternProperties": {pattern: {"type": "integer", "maximum": 5} for pattern in patterns},
        "additionalProperties": {"type": "integer"},
    }  # fmt: skip
    lark = schema_lark(schema, FREE)
    assert follows(lark, '{"score": 5, "tag": 5, "more": 1}') and not follows(lark, '{"score": 6, "tag": 5}')
    assert follows(lark, '{"score": 5, "tag": 6}') == all("tag" not in pattern for pattern in patterns)


@pytest.mark.parametrize("seed", range(8))
def test_nothing_comes_after_the_last_name_that_there_can_be(seed: int) -> None:
    """The library alone goes on, and finds nothing that may."""
    schema = {
        "type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False,
        "patternProperties": {"^a$": {"type": "integer"}},
    }  # fmt: skip
    assert drawn(schema_lark(schema, Spacing()), random.Random(seed)) == '{"a":1}'


def test_patterns_that_cannot_be_combined_or_read() -> None:
    named = {"patternProperties": {"^a$": {}}, "additionalProperties": False}
    with pytest.raises(SchemaError, match="fits only names"):
        ReadSchema({"allOf": [{"properties": {"a": {}}}, named]})
    assert matcher(schema_lark({"patternProperties": {"(": {}}}, FREE)).is_error()


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
