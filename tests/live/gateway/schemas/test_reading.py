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
from llguidance import LLMatcher, LLTokenizer

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

from .test_grammar import drawn, follows

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


@pytest.mark.parametrize("form", ["password", "regex", "binary", "textarea", "idn-email", "x", 5, None])
def test_formats_that_are_not_known_are_annotations(form: Any) -> None:
    lark = schema_lark({"type": "string", "maxLength": 3, "format": form}, FREE)
    assert follows(lark, '"abc"') and not follows(lark, '"abcd"')


@pytest.mark.parametrize(
    ("form", "right"),
    [("date", "2026-11-26"), ("uuid", "0" * 8 + "-0000" * 3 + "-" + "0" * 12), ("ipv4", "1.2.3.4")],
)
def test_formats_that_are_known_are_followed(form: str, right: str) -> None:
    lark = schema_lark({"type": "string", "format": form}, FREE)
    assert follows(lark, f'"{right}"') and not follows(lark, '"abc"')


def test_formats_of_what_is_no_string() -> None:
    for form in ("int32", "int64", "date", "double"):
        assert follows(schema_lark({"type": ["integer", "null"], "format": form}, FREE), "5")


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
    matcher = LLMatcher(LLTokenizer("byte"), schema_lark(schema, FREE), log_level=0)
    assert matcher.is_error() and f'"{word}"' in matcher.get_error()


NONE = dict.fromkeys(["required", "enum", "pattern", "properties", "items", "minimum", "$ref", "anyOf"])


@pytest.mark.parametrize(
    "words",
    [NONE, {"uniqueItems": False}, {"unevaluatedProperties": True}]
    + [{"propertyNames": names} for names in (True, {"title": "x"}, {"type": "string", "description": "x"})],
    ids=str,
)
def test_words_that_constrain_nothing(words: dict[str, Any]) -> None:
    """As Go and Java write what is not there, and zod writes records."""
    for schema in ({"type": "string"}, {"type": "integer", "maximum": 2**63 - 1}, {"const": None}):
        assert schema_lark({"type": "object", "additionalProperties": words | schema}, FREE) == schema_lark(
            {"type": "object", "additionalProperties": schema}, FREE
        )


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
ENDLESS: Any = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "schema",
    [
        ENDLESS,
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


def test_a_part_that_no_finite_value_fits_is_left_out() -> None:
    endless = {"$defs": {"E": json.loads(json.dumps(ENDLESS).replace("#", "#/$defs/E"))}}
    lark = schema_lark({"type": "object", "properties": {"a": {"$ref": "#/$defs/E"}, "b": {}}, **endless}, FREE)
    assert follows(lark, '{"b": 1}') and not follows(lark, '{"a"')
    tree = {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}
    either = {"type": ["array", "object"], "minProperties": 1, "additionalProperties": {"$ref": "#"}}
    assert follows(schema_lark(either, FREE), '{"a": []}')
    assert follows(schema_lark(tree, FREE), '{"a": {"a": {}}}')


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


def test_patterns_of_schemas_that_are_combined() -> None:
    schema = {
        "allOf": [{"properties": {"a": {}}}, {"patternProperties": {"^a$": {}}, "additionalProperties": False}]
    }
    with pytest.raises(SchemaError, match="fits only names"):
        ReadSchema(schema)


def test_patterns_that_python_does_not_read() -> None:
    """The library does, and says it itself where it does not."""
    schema = {"type": "object", "properties": {"a": {}}, "patternProperties": {r"^\p{L}$": {"type": "null"}}}
    lark = schema_lark(schema, FREE)
    assert follows(lark, '{"a": null, "b": null}') and not follows(lark, '{"b": 1}')
    assert LLMatcher(
        LLTokenizer("byte"), schema_lark({"patternProperties": {"(": {}}}, FREE), log_level=0
    ).is_error()


def test_a_pattern_that_forbids_all_other_names() -> None:
    lark = schema_lark({"type": "object", "properties": {"a": {}}, "patternProperties": {".*": False}}, FREE)
    assert follows(lark, "{}") and not follows(lark, '{"b": 1}')


def test_a_name_that_is_spelled_with_escapes_evades_nothing() -> None:
    lark = schema_lark({"type": "object", "properties": {"a": {"type": "string"}}}, FREE)
    assert follows(lark, '{"b": "\\n"}') and not follows(lark, '{"\\u0061": 1}')
    lark = schema_lark({"type": "object", "properties": {"a": {"const": "\x01"}}, "required": ["a"]}, FREE)
    assert follows(lark, '{"a": "\\u0001"}')


def test_counts_may_be_written_as_fractions() -> None:
    lark = schema_lark({"type": "string", "minLength": 2.0, "maxLength": Decimal("3.0")}, FREE)
    assert follows(lark, '"ab"') and not follows(lark, '"a"') and not follows(lark, '"abcd"')


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


def test_counts_that_no_answer_reaches() -> None:
    lark = schema_lark(
        {"type": "array", "maxItems": 2**64, "items": {"type": "string", "maxLength": 1e300}}, FREE
    )
    assert follows(lark, '["ab"]')


@pytest.mark.parametrize(
    ("number", "exact"),
    [
        (2**53 - 1, True), (2**53, False), (-(2**63), False), (0.1, True), (1e22, False), (Decimal("0.1"), True),
        (Decimal("0.12345678901234567890"), False), (float("inf"), False), (True, True), ("x", True),
    ],
)  # fmt: skip
def test_numbers_that_the_library_keeps(number: Any, exact: bool) -> None:
    assert is_exact(number) == exact
