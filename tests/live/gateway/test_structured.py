"""From the fields that say how an answer must look to one grammar, and what cannot be followed."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from isthmus.core.errors import RequestError
from isthmus.live.gateway import GatewayTokenizer
from isthmus.live.gateway.fields import parse_body
from isthmus.live.gateway.requests import ChatRequest, CompletionRequest
from isthmus.live.gateway.structured import check_grammar, grammar_of
from isthmus.model_files.grammar_limits import GRAMMAR_LIMITS

from .fake import FakeBackend
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


def follows(tokens: LLTokenizer, grammar: str, text: str) -> bool:
    """Whether `text` is a whole answer."""
    matcher = LLMatcher(tokens, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokens.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


SCHEMAS = {
    "response_format.json_schema.schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": AGE}}
    },
    "structured_outputs.json": {"structured_outputs": {"json": AGE}},
    "guided_json": {"guided_json": AGE},
    "json_schema": {"json_schema": json.dumps(AGE)},
}
LETTERS = {
    "structured_outputs.regex": {"structured_outputs": {"regex": "a|bc"}},
    "structured_outputs.choice": {"structured_outputs": {"choice": ["a", "bc"]}},
    "structured_outputs.grammar": {"structured_outputs": {"grammar": 'start: "a" | "bc"'}},
    "guided_regex": {"guided_regex": "a|bc"},
    "guided_choice": {"guided_choice": ["a", "bc"]},
    "guided_grammar": {"guided_grammar": 'root ::= "a" | "bc"'},
    "regex": {"regex": "a|bc"},
    "ebnf": {"ebnf": 'root ::= "a" | "bc"'},
}


@pytest.mark.parametrize("param", SCHEMAS)
def test_schemas(param: str, tokens: LLTokenizer) -> None:
    grammar, found = grammar_of(parse(**SCHEMAS[param]))
    assert found == param
    check_grammar(grammar, param, tokens, GRAMMAR_LIMITS)
    for text in ('{"age":7}', '{"age": 7}', '{\n  "age": 99\n}'):
        assert follows(tokens, grammar, text)
    for text in ('{"age": 100}', "{}", '{"age": 7, "b": 1}', '{"age":' + " " * 40 + "7}", "7"):
        assert not follows(tokens, grammar, text)


@pytest.mark.parametrize("param", LETTERS)
def test_words(param: str, tokens: LLTokenizer) -> None:
    grammar, found = grammar_of(parse(**LETTERS[param]))
    assert found == param
    check_grammar(grammar, param, tokens, GRAMMAR_LIMITS)
    assert [text for text in ("a", "b", "bc", "abc", "") if follows(tokens, grammar, text)] == ["a", "bc"]


def test_choices_are_taken_as_they_are(tokens: LLTokenizer) -> None:
    choices = ['say "x"', "a\nb", "\\d", "grüß 😀", "start: /x/"]
    grammar, _ = grammar_of(parse(guided_choice=choices))
    assert all(follows(tokens, grammar, choice) for choice in choices)
    assert not follows(tokens, grammar, "5")


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_any_object(fields: dict[str, Any], tokens: LLTokenizer) -> None:
    grammar, _ = grammar_of(parse(**fields))
    assert follows(tokens, grammar, '{"a": [1, {"b": null}]}')
    assert not follows(tokens, grammar, "[1]")


def test_no_white_space(tokens: LLTokenizer) -> None:
    grammar, _ = grammar_of(parse(structured_outputs={"json": AGE, "disable_any_whitespace": True}))
    assert follows(tokens, grammar, '{"age":7}')
    assert not follows(tokens, grammar, '{"age": 7}')


def test_nothing_asked() -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"guided_json": None}):
        assert grammar_of(parse(**fields)) == ("", "")


def test_two_that_contradict_each_other() -> None:
    with pytest.raises(RequestError, match="'guided_regex' and 'regex' each say"):
        grammar_of(parse(guided_regex="a", regex="b"))
    with pytest.raises(RequestError, match="says nothing"):
        grammar_of(parse(structured_outputs={}))


def test_jobs_carry_it(post: Poster, backend: FakeBackend) -> None:
    assert post.chat(response_format={"type": "json_object"}, n=2).status_code == 200
    assert {job.sampling.grammar for job in backend.jobs} == {
        grammar_of(
            parse_body(
                ChatRequest,
                b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}',
                100,
            )
        )[0]
    }


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
