"""From the fields that say how an answer must look to one grammar, and what cannot be followed."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from llguidance import LLTokenizer

from isthmus.core.errors import RequestError
from isthmus.live.gateway import GatewayTokenizer
from isthmus.live.gateway.fields import parse_body
from isthmus.live.gateway.requests import CompletionRequest
from isthmus.live.gateway.structured import check_grammar, grammar_of
from isthmus.model_files.grammar_limits import GRAMMAR_LIMITS

from .fake import FakeBackend
from .grammars import follows
from .inprocess import Poster

AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}


def parse(**fields: Any) -> CompletionRequest:
    found: CompletionRequest = parse_body(CompletionRequest, json.dumps({"prompt": "x"} | fields).encode(), 100)
    return found


@pytest.fixture(scope="module")
def tokens(tokenizer: GatewayTokenizer) -> LLTokenizer:
    return tokenizer.for_grammars


IN_OPENAI_S = {"type": "json_schema", "json_schema": {"name": "a", "schema": AGE}}
SCHEMA = (
    ['{"age":7}', '{"age": 7}', '{\n  "age": 99\n}'],
    ['{"age": 100}', "{}", '{"age": 7, "b": 1}', '{"age":' + " " * 40 + "7}", "7"],
)
LETTERS = ["a", "bc"], ["b", "abc", ""]
OBJECT = ['{"a": [1, {"b": null}]}'], ["[1]"]
CHOICES = ['say "x"', "a\nb", "\\d", "grüß 😀", "start: /x/"]
FORMS: list[tuple[str, dict[str, Any], tuple[list[str], list[str]]]] = [
    ("response_format.json_schema.schema", {"response_format": IN_OPENAI_S}, SCHEMA),
    ("structured_outputs.json", {"structured_outputs": {"json": AGE}}, SCHEMA),
    ("guided_json", {"guided_json": AGE}, SCHEMA),
    ("json_schema", {"json_schema": json.dumps(AGE)}, SCHEMA),
    (
        "structured_outputs.json",
        {"structured_outputs": {"json": AGE, "disable_any_whitespace": True}},
        (['{"age":7}'], ['{"age": 7}']),
    ),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "a|bc"}}, LETTERS),
    ("structured_outputs.choice", {"structured_outputs": {"choice": ["a", "bc"]}}, LETTERS),
    ("structured_outputs.grammar", {"structured_outputs": {"grammar": 'start: "a" | "bc"'}}, LETTERS),
    ("guided_regex", {"guided_regex": "a|bc"}, LETTERS),
    ("guided_choice", {"guided_choice": ["a", "bc"]}, LETTERS),
    ("guided_choice", {"guided_choice": CHOICES}, (CHOICES, ["5"])),
    ("guided_grammar", {"guided_grammar": 'root ::= "a" | "bc"'}, LETTERS),
    ("regex", {"regex": "a|bc"}, LETTERS),
    ("ebnf", {"ebnf": 'root ::= "a" | "bc"'}, LETTERS),
    ("response_format", {"response_format": {"type": "json_object"}}, OBJECT),
    ("structured_outputs.json_object", {"structured_outputs": {"json_object": True}}, OBJECT),
]


@pytest.mark.parametrize(("param", "fields", "texts"), FORMS)
def test_a_grammar_of_each_form(
    param: str, fields: dict[str, Any], texts: tuple[list[str], list[str]], tokens: LLTokenizer
) -> None:
    grammar, found = grammar_of(parse(**fields))
    assert found == param
    check_grammar(grammar, param, tokens, GRAMMAR_LIMITS)
    right, wrong = texts
    assert [text for text in (*right, *wrong) if follows(tokens, grammar, text)] == right


def test_nothing_asked() -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"guided_json": None}):
        assert grammar_of(parse(**fields)) == ("", "")


def test_two_that_contradict_each_other() -> None:
    with pytest.raises(RequestError, match="'guided_regex' and 'regex' each say"):
        grammar_of(parse(guided_regex="a", regex="b"))
    with pytest.raises(RequestError, match="says nothing"):
        grammar_of(parse(structured_outputs={}))


def test_jobs_carry_it(post: Poster, backend: FakeBackend) -> None:
    fields = {"response_format": {"type": "json_object"}}
    assert post.chat(n=2, **fields).status_code == 200
    assert {job.sampling.grammar for job in backend.jobs} == {grammar_of(parse(**fields))[0]}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"regex": "a+"},
        {"guided_choice": ["a", "b"]},
        {"ebnf": 'root ::= "a"'},
        {"guided_grammar": 'start: "a"'},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_without_the_library_a_field_is_refused_by_name(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    (param,) = fields
    with pytest.raises(RequestError, match=rf"'{param}'.*llguidance, which is not installed") as refused:
        grammar_of(parse(**fields))
    assert refused.value.param == param
    assert grammar_of(parse()) == ("", "")


def test_a_text_that_no_grammar_holds(post: Poster) -> None:
    """What else cannot be followed is recorded."""
    error = post.complete(guided_json={"enum": ["x" * 1_100_000]}).json()["error"]
    assert error["param"] == "guided_json" and "longer than" in error["message"]
