"""What bodies are: encodings of JSON, what is none, how deep it nests, and how fast the first fault is found."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import RequestError
from isthmus.live.gateway.fields import parse_body
from isthmus.live.gateway.requests import ChatRequest, CompletionRequest


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


USER = {"role": "user", "content": "hi"}


def complaint(body: object) -> tuple[str | None, str]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(RequestError) as caught:
        parse_body(ChatRequest, raw, 100)
    return caught.value.param, str(caught.value)


def field(**fields: object) -> tuple[str | None, str]:
    return complaint({"model": "m", "messages": [USER]} | fields)


def test_values_are_shown_next_to_what_is_expected() -> None:
    assert field(temperature="hot") == (
        "temperature",
        "'temperature' must be a number from 0 to 2, got \"hot\"",
    )
    assert field(n=129) == ("n", "'n' must be an integer from 1 to 128, got 129")
    _, message = field(user="x" * 10_000)
    assert len(message) < 200


def test_the_first_of_a_million_faults_is_enough() -> None:
    """One error each would take seconds, in which no other request moves."""
    many = dict.fromkeys(map(str, range(100_000)), 0)
    assert field(**many)[0] == "0"
    assert field(messages=[{"role": "user"} | many])[0] == "messages[0].0"
    assert field(messages=[many])[0] == "messages[0].role"
    assert field(messages=list(many))[0] == "messages[0]"
