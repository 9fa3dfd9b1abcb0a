"""The line a client reads for each kind of fault."""

from __future__ import annotations

import json

import pytest

from isthmus.core.errors import RequestError
from isthmus.live.gateway.bodies import parse_body
from isthmus.live.gateway.requests import ChatRequest

USER = {"role": "user", "content": "hi"}


def complaint(body: object) -> tuple[str | None, str]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(RequestError) as caught:
        parse_body(ChatRequest, raw, 100)
    return caught.value.param, str(caught.value)


def field(**fields: object) -> tuple[str | None, str]:
    return complaint({"model": "m", "messages": [USER]} | fields)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"a": NaN', b"[" * 100, b'{"user": "\\ud800"}'])
def test_no_json(body: bytes) -> None:
    param, message = complaint(body)
    assert param is None
    assert message.startswith("the body is not valid JSON: ")


@pytest.mark.parametrize("body", [[], "x", 5, None])
def test_no_object(body: object) -> None:
    assert complaint(body) == (None, "the body must be a JSON object")


def test_missing_fields() -> None:
    assert complaint({"model": "m"}) == ("messages", "'messages' is required")


def test_values_are_shown_next_to_what_is_expected() -> None:
    assert field(temperature="hot") == (
        "temperature",
        "'temperature' must be a number from 0 to 2, got \"hot\"",
    )
    assert field(n=129) == ("n", "'n' must be an integer from 1 to 128, got 129")
    _, message = field(user="x" * 10_000)
    assert len(message) < 200


def test_typos_get_the_nearest_name() -> None:
    expected = "'temprature' is not a known field; did you mean 'temperature'?"
    assert field(temprature=1) == ("temprature", expected)


def test_the_first_of_a_million_faults_is_enough() -> None:
    """One error each would take seconds, in which no other request moves."""
    many = dict.fromkeys(map(str, range(100_000)), 0)
    assert field(**many)[0] == "0"
    assert field(messages=[{"role": "user"} | many])[0] == "messages[0].0"
    assert field(messages=[many])[0] == "messages[0].role"
    assert field(messages=list(many))[0] == "messages[0]"


def test_no_name_is_near() -> None:
    assert field(zzz=1) == ("zzz", "'zzz' is not a known field")


def test_unserved_fields_are_not_suggested() -> None:
    assert field(audi={}) == ("audi", "'audi' is not a known field")


def test_places_inside_lists_and_objects() -> None:
    wrong = USER | {"nme": "x"}
    expected = "'messages[1].nme' is not a known field; did you mean 'name'?"
    assert field(messages=[USER, wrong]) == ("messages[1].nme", expected)
    param, message = field(messages=["a"])
    assert param == "messages[0]"
    assert message.startswith("'messages[0]' is wrong: input should be")
    param, message = field(stream=True, stream_options={"include_usge": True})
    assert param == "stream_options.include_usge"
    assert message.endswith("did you mean 'include_usage'?")


def test_braces_in_values_are_harmless() -> None:
    assert field(stop={"{x}": "{}"})[0] == "stop"
