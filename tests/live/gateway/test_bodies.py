"""What bodies are: encodings of JSON, what is none, how deep it nests, and how fast the first fault is found."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import RequestError
from isthmus.live.gateway.fields import parse_body
from isthmus.live.gateway.requests import ChatRequest, CompletionRequest

USER = {"role": "user", "content": "hi"}
MANY = dict.fromkeys(map(str, range(100_000)), 0)


@given(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.sampled_from(
        ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
    ),
    st.booleans(),
)
def test_a_text_is_the_same_in_every_encoding(text: str, encoding: str, ascii: bool) -> None:
    body = json.dumps({"prompt": text}, ensure_ascii=ascii).encode(encoding)
    assert parse_body(CompletionRequest, body, 100).prompt == (text,)


@given(st.binary(max_size=60))
def test_whatever_comes_is_read_or_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse_body(CompletionRequest, body, 100)


def test_depth_takes_the_same_time_for_each_byte() -> None:
    """A text that is never closed was searched for its end from each of its quotes: 2 s for so small a body."""
    body = b"[" * 101 + b'"' + rb"\"" * 9900
    before_s = time.process_time()
    with pytest.raises(RequestError, match="deeper than 100"):
        parse_body(CompletionRequest, body, 100)
    assert time.process_time() - before_s < 0.2


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([USER], MANY, "0"),
        ([USER | MANY], {}, "messages[0].0"),
        ([MANY], {}, "messages[0].role"),
        (list(MANY), {}, "messages[0]"),
        ([USER], {"user": "x" * 10_000, "n": 129}, "n"),
        ([USER], {"temperature": "x" * 10_000}, "temperature"),
    ],
)
def test_the_first_of_a_million_faults_is_enough_and_values_are_shortened(
    messages: list[Any], fields: dict[str, Any], param: str
) -> None:
    """One error each would take seconds, in which no other request moves."""
    with pytest.raises(RequestError) as caught:
        parse_body(ChatRequest, json.dumps({"messages": messages} | fields).encode(), 100)
    assert caught.value.param == param and len(str(caught.value)) < 300
