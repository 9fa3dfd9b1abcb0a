"""JSON that a schema's grammar allows: it validates, and numbers have the schema's very digits."""

from __future__ import annotations

import itertools
import json
import random
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from isthmus.live.gateway.schemas.grammar import Spacing, lark_as_read, schema_lark
from isthmus.live.gateway.schemas.reading import SchemaError
from tests.schemas import wild

from .. import grammars

TOKENIZER = LLTokenizer("byte")


def matcher(lark: str) -> LLMatcher:
    return grammars.matcher_of(TOKENIZER, lark)


def follows(lark: str, text: str) -> bool:
    return grammars.follows(TOKENIZER, lark, text)


def validates(text: str, schema: Any) -> bool:
    """Whether JSON fits a schema, without rounding."""

    def number(text: str) -> Decimal | float:
        return float(text) if len(text) > 20 and "e" in text.lower() else Decimal(text)

    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    try:
        return bool(jsonschema.Draft202012Validator(exact).is_valid(json.loads(text, parse_float=number)))
    except RecursionError:  # jsonschema follows alternatives in circles, whatever the text is
        return True


INTEGERS = st.integers(-(2**65), 2**65) | st.sampled_from([0, 2**53, 2**53 + 1, 2**63, 2**64 - 1, -(2**63)])
NUMBERS = INTEGERS | st.integers(-20, 20) | st.integers(-99, 99).map(lambda number: number / 4)


@settings(max_examples=60)
@given(st.data())
def test_bounds_hold_wherever_they_stand(data: st.DataObject) -> None:
    words = data.draw(
        st.dictionaries(
            st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]), NUMBERS, max_size=3
        )
    )
    kind = data.draw(st.sampled_from(["integer", "number", ["integer", "null"]]))
    inner = {"type": kind, **words}
    schema, frame = data.draw(st.sampled_from(FRAMES))
    schema = json.loads(json.dumps(schema).replace('"HERE"', json.dumps(inner)))
    near = [number + step for number in words.values() for step in (-1, 0, 1, 0.25)]
    texts = [json.dumps(number) for number in (*near, 0, -7, data.draw(NUMBERS))]
    try:
        lark = schema_lark(schema, Spacing())
        if matcher(lark).is_error():
            raise SchemaError  # the library says that nothing fits
    except SchemaError:
        assert not any(validates(frame.replace("@", text), schema) for text in texts if "." not in text)
        return
    for text in texts:
        whole = frame.replace("@", text)
        if "e" not in text and not (text.endswith(".0") and kind != "number"):
            assert follows(lark, whole) == validates(whole, schema), whole


FRAMES: list[tuple[Any, str]] = [
    ("HERE", "@"),
    ({"type": "array", "items": "HERE", "minItems": 1, "maxItems": 2}, "[@,@]"),
    ({"type": "array", "prefixItems": [{"type": "null"}, "HERE"], "items": False}, "[null,@]"),
    ({"type": "object", "properties": {"x": {}, "a": "HERE"}, "required": ["a"]}, '{"x":[1],"a":@,"y":2}'),
    ({"type": "object", "additionalProperties": "HERE"}, '{"a":@,"b":@}'),
    ({"anyOf": [{"type": "null"}, {"allOf": ["HERE"]}]}, "@"),
    ({"$ref": "#/$defs/N", "$defs": {"N": {"type": "object", "properties": {"n": "HERE", "m": {"$ref": "#"}},
      "additionalProperties": False}}}, '{"n":@,"m":{"m":{"n":@}}}'),
]  # fmt: skip


@pytest.mark.parametrize("seeds", [range(at, at + 40) for at in range(0, 160, 40)], ids=str)
def test_whatever_is_allowed_ends_in_json_that_validates(seeds: range) -> None:
    """The library alone dies midway of some of these schemas, and goes on for ever with others."""
    num_ends = 0
    for seed in seeds:
        schema = wild(random.Random(seed))
        try:
            lark = schema_lark(schema, Spacing())
        except SchemaError:
            continue
        if not matcher(lark).is_error():
            texts = [drawn(lark, random.Random(f"{seed} {at}")) for at in range(3)]
            num_ends += sum(map(bool, texts))
            assert all(validates(text, schema) for text in texts if text), (schema, texts)
    assert num_ends > 40


def drawn(lark: str, draw: random.Random) -> str:
    """A random answer; "" where none came to its end."""
    end = TOKENIZER.eos_token

    def choose(allowed: list[int]) -> int:
        if end in allowed and (len(allowed) == 1 or draw.random() < 0.5):
            return end
        plain = [token for token in allowed if 32 <= token < 127] or [each for each in allowed if each != end]
        closing = [token for token in plain if token in b'"}]']
        return draw.choice(closing if closing and draw.random() < 0.4 else plain)

    *tokens, last = itertools.islice(grammars.written(matcher(lark), end, choose), 300)
    return bytes(tokens).decode() if last == end else ""


@pytest.mark.parametrize(
    ("lark", "right", "wrong"),
    [
        ('start: "v=" %json {"const": 1234567890123456789}', "v=1234567890123456789", "v=1234567890123456768"),
        (
            'start: a\na: %json{"enum":[1e0, 0.12345678901234567890123]}"!"',
            "0.12345678901234567890123!",
            "0.12345678901234568!",
        ),
        ('start: %json {"type": "string", "format": "password"}', '"x"', "x"),
        ('start: "%json {" /%json [{]/ // %json {\n', "%json {%json {", "x"),
        ("start: a\na: %lark {\nstart: b\nb: %json {\"const\": 9007199254740993}\n}", "9007199254740993", "2"),
    ],
)  # fmt: skip
def test_schemas_in_lark_are_read_alike(lark: str, right: str, wrong: str) -> None:
    read = lark_as_read(lark)
    assert follows(read, right) and not follows(read, wrong)


@pytest.mark.parametrize(
    "lark",
    [
        "start: %json x",
        "start: %json",
        'start: a\na: %lark {\nstart: %json {"items": {"const": 9007199254740993}}\n}',
        'start: %json {"const": 1e9999999999999999999}',
        'start: %json {"maximum": 1e999999999}',
        'start: %json {"const": Infinity}',
    ],
)
def test_lark_whose_schemas_cannot_be_read(lark: str) -> None:
    with pytest.raises(SchemaError):
        lark_as_read(lark)
