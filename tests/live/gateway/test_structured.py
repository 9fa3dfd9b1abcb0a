"""From the fields that say how an answer must look to one grammar, and what cannot be followed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
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


def parse(**fields: Any) -> CompletionRequest:
    found: CompletionRequest = parse_body(CompletionRequest, json.dumps({"prompt": "x"} | fields).encode(), 100)
    return found


@pytest.fixture(scope="module")
def tokens(tokenizer: GatewayTokenizer) -> LLTokenizer:
    return tokenizer.for_grammars


FORMS = json.loads((Path(__file__).parent / "tables" / "structured.json").read_text())


@pytest.mark.parametrize("row", FORMS, ids=lambda row: row["field"])
def test_a_grammar_of_each_form(row: dict[str, Any], tokens: LLTokenizer) -> None:
    """tables/structured.json: the field of a body that constrains the answer, and answers that fit or do not."""
    grammar, field = grammar_of(parse(**row["body"]))
    assert field == row["field"]
    check_grammar(grammar, field, tokens, GRAMMAR_LIMITS)
    assert [text for text in row["right"] + row["wrong"] if follows(tokens, grammar, text)] == row["right"]


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
