"""What the bodies of chat and completions accept and refuse, field by field: tables/fields.json, a line for each field.

`good`: what is taken; `bad`: what is refused, where, and the line that says so (… is another library's)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.errors import RequestError
from isthmus.live.gateway.fields import parse_body
from isthmus.live.gateway.requests import ChatRequest, CompletionRequest

USUAL: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "hi"}]}),
    "completion": (CompletionRequest, {"model": "m", "prompt": "hi"}),
}
ROWS = [
    (kind, row["good"], row["bad"])
    for row in json.loads((Path(__file__).parent / "tables" / "fields.json").read_text())
    for kind in row["of"]
]


def parse(kind: str, **fields: Any) -> Any:
    model, usual = USUAL[kind]
    return parse_body(model, json.dumps(usual | fields).encode(), 100)


@pytest.mark.parametrize(("kind", "fields"), [(kind, fields) for kind, good, _ in ROWS for fields in good])
def test_accepted(kind: str, fields: dict[str, Any]) -> None:
    """And each field may be null, which means absent, but for what a body cannot be without."""
    read, without = parse(kind, **fields), parse(kind)
    for name in fields:
        assert getattr(read, name) is not None
        assert name == "prompt" or parse(kind, **{name: None}) == without


@pytest.mark.parametrize(
    ("kind", "fields", "param", "line"), [(kind, *each) for kind, _, bad in ROWS for each in bad]
)
def test_refused(kind: str, fields: dict[str, Any], param: str, line: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(kind, **fields)
    assert (caught.value.http_status, caught.value.param) == (400, param)
    begin, left_out, _ = line.partition("…")
    assert str(caught.value).startswith(begin) if left_out else str(caught.value) == line
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        ([], ((),)),
    ],
)
def test_prompts(prompt: object, parsed: object) -> None:
    assert parse("completion", prompt=prompt).prompt == parsed
