"""The benchmark's schemas, its judge, and its sums; the model is the benchmark's own matter."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher

from benchmarks.structured import Answer, Plan, Turn, fault_of, schemas, table, verdict
from isthmus.live.gateway.bodies import parse_body
from isthmus.live.gateway.requests import ChatRequest
from isthmus.live.gateway.structured import grammar_of

PLAN = Plan(2, 8, 2, 0, None)  # type: ignore[arg-type]


def test_schemas_are_many_and_can_be_followed() -> None:
    wanted = schemas(100, 0)
    assert len({json.dumps(schema) for schema in wanted}) >= 95
    assert wanted == schemas(100, 0) != schemas(100, 1)
    for schema in wanted:
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        body = {"messages": [{"role": "user", "content": "x"}], "response_format": form}
        grammar, _ = grammar_of(parse_body(ChatRequest, json.dumps(body).encode(), 100))
        assert LLMatcher.validate_grammar(grammar) == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1}', ""),
        ('{"a": ', "no JSON"),
        ('{"a": "1"}', "$.a: '1' is not of type 'integer'"),
        ("{}", "required"),
    ],
)
def test_the_judge(text: str, words: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    fault = fault_of(text, schema)
    assert words in fault
    assert bool(fault) == bool(words)


def test_what_a_token_takes_more() -> None:
    def turn(side: str, token_ms: float, fault: str = "") -> Turn:
        return Turn(side, (Answer(11, 5, token_ms), Answer(1, 5, 0, fault)), 1)

    turns = [
        turn("schema", 12),
        turn("none", 10),
        turn("schema", 15),
        turn("none", 14),
        turn("death", 9, "no JSON"),
    ]
    assert verdict(turns) == "a schema adds 1.50 ms to a token (of 2 turns the median)\nfault: no JSON"
    assert table(PLAN, turns).row_count == 5
