"""JSON that a schema's grammar allows: it validates, and numbers have the schema's very digits."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from isthmus.live.gateway.schemas.grammar import FREE, Spacing, lark_as_read, schema_lark
from isthmus.live.gateway.schemas.reading import SchemaError
from isthmus.model_files.grammar import LIMITS
from tests.schemas import wild

TOKENIZER = LLTokenizer("byte")
INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
UINT64 = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1, "format": "uint64"}


def matcher(lark: str) -> LLMatcher:
    return LLMatcher(TOKENIZER, lark, log_level=0, limits=LIMITS)


def follows(lark: str, text: str) -> bool:
    found = matcher(lark)
    assert not found.is_error(), found.get_error()
    tokens = TOKENIZER.tokenize_str(text)
    return found.try_consume_tokens(tokens) == len(tokens) and found.is_accepting()


def number(text: str) -> Decimal | float:
    return float(text) if len(text) > 20 and "e" in text.lower() else Decimal(text)


def validates(text: str, schema: Any) -> bool:
    """Without rounding."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    try:
        return bool(jsonschema.Draft202012Validator(exact).is_valid(json.loads(text, parse_float=number)))
    except RecursionError:  # it follows alternatives in circles, whatever the text is
        return True


@pytest.mark.parametrize("number", [1234567890123456789, 2**64 - 1, -(2**63), 2**53 + 1, 10**30, 5])
@pytest.mark.parametrize("word", ["const", "enum"])
def test_a_number_has_the_digits_that_were_asked_for(number: int, word: str) -> None:
    schema = {"type": "object", "properties": {"a": {word: number if word == "const" else [number, "b"]}}}
    lark = schema_lark(schema | {"required": ["a"], "additionalProperties": False}, FREE)
    assert follows(lark, f'{{ "a": {number} }}') and follows(lark, f'{{"a":{number}}}')
    for other in {str(number + 1), str(int(float(number))), f"{number}0", str(-number)} - {str(number)}:
        assert not follows(lark, f'{{"a": {other}}}')


FEW = settings(max_examples=60)
INTEGERS = st.integers(-(2**65), 2**65) | st.sampled_from([0, 2**53, 2**53 + 1, 2**63, 2**64 - 1, -(2**63)])
NUMBERS = INTEGERS | st.integers(-20, 20) | st.integers(-99, 99).map(lambda number: number / 4)


@FEW
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
    found, answer = matcher(lark), bytearray()
    end = TOKENIZER.eos_token
    for _ in range(300):
        mask = np.unpackbits(np.frombuffer(found.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = [int(token) for token in np.flatnonzero(mask)]
        assert allowed and not found.is_error(), (lark, bytes(answer), found.get_error())
        if end in allowed and (len(allowed) == 1 or draw.random() < 0.5):
            return answer.decode()
        plain = [token for token in allowed if 32 <= token < 127] or [
            token for token in allowed if token != end
        ]
        closing = [token for token in plain if token in b'"}]']
        answer.append(draw.choice(closing if closing and draw.random() < 0.4 else plain))
        assert found.consume_token(answer[-1]), found.get_error()
    return ""


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({**INT64, "multipleOf": 3}, "'multipleOf' at #"),
        ({"properties": {"a": {"allOf": [INT64, {"minimum": 0}]}}}, "'allOf' of several at #/properties/a"),
        ({"oneOf": [INT64, {"type": "number"}]}, "'oneOf' of schemas that may both fit"),
        ({"type": "object", "patternProperties": {"^a": INT64}}, "'patternProperties' at #"),
        ({"items": {**INT64, "enum": [2**60 + 1], "minLength": 2}}, "'minimum' at #/items"),
        ({"type": "integer", "anyOf": [{"type": "number"}, {"const": 2**60 + 1}]}, "'type' at #"),
        ({"const": float("inf")}, "larger than a double"),
        ({"maximum": 10**500}, "more than 400 digits"),
        ({"exclusiveMinimum": 0, "maximum": 5e-324}, "more than 100 digits behind its point"),
        ({"minimum": 2**63, "maximum": -(2**63), "type": "integer"}, "nothing can fit #"),
        ({**INT64, "x-guidance": {"lenient": True}}, "'x-guidance'"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_the_name_of_its_place(schema: Any, reason: str) -> None:
    with pytest.raises(SchemaError) as caught:
        schema_lark(schema, FREE)
    assert reason in str(caught.value)


def test_a_type_beside_alternatives_of_it() -> None:
    ids = {"type": ["integer", "null"], "anyOf": [INT64, {"const": None}]}
    for schema in (ids, {"type": "number", "$ref": "#/$defs/A", "$defs": {"A": INT64}}):
        lark = schema_lark(schema, FREE)
        assert follows(lark, str(2**63 - 1)) and not follows(lark, str(2**63)) and not follows(lark, "0.5")


@pytest.mark.parametrize("words", [{"maxItems": 1}, {"minItems": 1, "maxItems": 1}], ids=str)
def test_an_array_of_one_large_number(words: dict[str, int]) -> None:
    lark = schema_lark({"type": "array", "items": INT64} | words, FREE)
    assert follows(lark, f"[{2**63 - 1}]") and not follows(lark, "[1, 2]")
    assert follows(lark, "[]") == ("minItems" not in words)


def test_alternatives_that_a_word_tells_apart() -> None:
    cat, dog = (
        {"type": "object", "properties": {"is": {"const": name}, "id": UINT64}, "required": ["is", "id"]}
        for name in ("cat", "dog")
    )
    lark = schema_lark({"oneOf": [cat, dog]}, FREE)
    assert follows(lark, '{"is": "dog", "id": 18446744073709551615}')
    assert not follows(lark, '{"is": "dog", "id": 18446744073709551616}')


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


NESTED = 'start: a\na: %lark {\nstart: %json {"items": {"const": 9007199254740993}}\n}'


@pytest.mark.parametrize(
    "lark",
    [
        "start: %json x",
        "start: %json",
        NESTED,
        'start: %json {"const": 1e9999999999999999999}',
        'start: %json {"maximum": 1e999999999}',
        'start: %json {"const": Infinity}',
    ],
)
def test_lark_whose_schemas_cannot_be_read(lark: str) -> None:
    with pytest.raises(SchemaError):
        lark_as_read(lark)
