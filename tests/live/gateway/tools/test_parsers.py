"""Answers as models write them: what is found does not depend on how they arrive, and nothing of them is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.live.gateway.tools import FORMATS
from isthmus.live.gateway.tools.parser import Arguments, CallBegun, Content, Finding, merged

SCHEMAS: dict[str, Any] = {
    "now": {},
    "get_weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "at": {"$ref": "#/$defs/Place"},
        },
        "$defs": {"Place": {"type": "object"}},
    },
    "write": {"properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
}


@dataclass(frozen=True)
class Recorded:
    """An answer, the calls in it as (name, arguments), and its content."""

    format: str
    text: str
    calls: tuple[tuple[str, Any], ...] = ()
    content: str = ""


RECORDED = {
    row.pop("name"): Recorded(calls=tuple(map(tuple, row.pop("calls"))), **row)
    for row in json.loads((Path(__file__).parent.parent / "tables" / "calls.json").read_text())
}


def parse(format_name: str, pieces: Sequence[str], schemas: Any = SCHEMAS) -> list[Finding]:
    """All events, as if they had come at once."""
    parser = FORMATS[format_name](schemas)
    return merged([event for found in (*map(parser.push, pieces), parser.flush()) for event in found])


def calls_of(events: Sequence[Finding]) -> tuple[tuple[str, Any], ...]:
    """Each call as (name, arguments); arguments that are no JSON stay text."""

    def read(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    begun = [event for event in events if isinstance(event, CallBegun)]
    assert [event.index for event in begun] == list(range(len(begun)))
    written = [
        "".join(e.text for e in events if isinstance(e, Arguments) and e.index == at)
        for at in range(len(begun))
    ]
    return tuple((call.name, read(text)) for call, text in zip(begun, written, strict=True))


def content_of(events: Sequence[Finding]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_answers(name: str) -> None:
    """The same at once, a character at a time, and cut anywhere."""
    recorded = RECORDED[name]
    events = parse(recorded.format, [recorded.text])
    assert calls_of(events) == recorded.calls
    assert content_of(events) == recorded.content
    assert all((event.name if isinstance(event, CallBegun) else event.text).encode() for event in events)
    assert parse(recorded.format, list(recorded.text)) == events
    for at in range(len(recorded.text)):
        assert parse(recorded.format, [recorded.text[:at], "", recorded.text[at:]]) == events


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=write>", "<parameter=text>", "</parameter>", "</function>"),
    *(
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        '{"name": "now"',
        '"arguments": {',
        '"parameters": {',
    ),
    *('"', "{", "}", "[", "]", ",", ":", ";", "\\", "<", "\n", " ", "a", "é", "1", "null", "</para", "write"),
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join) | st.sampled_from(
    [recorded.text for recorded in RECORDED.values()]
)


FURTHER = {
    "hermes": ('<tool_call>{"name": "now", "arguments": {}}</tool_call>', "\n"),
    "llama3": ('{"name": "now", "parameters": {}}', "; "),
    "mistral": ("[TOOL_CALLS]now[ARGS]{}", ""),
    "qwen_coder": ("<tool_call>\n<function=now>\n</function>\n</tool_call>", "\n"),
}


@pytest.mark.parametrize("name", FURTHER)
def test_the_head_of_a_further_call_that_was_cut_off_is_no_content(name: str) -> None:
    call, between = FURTHER[name]
    more = between + call
    for at in range(len(more)):
        events = parse(name, [call + more[:at]])
        assert content_of(events) == "" and ("now", {}) in calls_of(events)
    text = RECORDED["mistral-several"].text
    for at in range(text.index("}"), len(text)):
        assert content_of(parse("mistral", [text[:at]])) == "Sure [1]."


@given(st.sampled_from(sorted(FORMATS)), texts, st.data())
def test_cuts_change_nothing_and_what_is_no_call_comes_back(name: str, text: str, data: st.DataObject) -> None:
    events = parse(name, [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    assert parse(name, [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]) == events
    if not calls_of(events):
        assert content_of(events) == text


@given(st.sampled_from(sorted(FORMATS)), texts)
def test_a_beginning_finds_what_the_whole_begins_with(name: str, text: str) -> None:
    """What was given out is never taken back, whatever comes."""
    parser = FORMATS[name](SCHEMAS)
    early = [event for event in parser.push(text[: len(text) // 2]) if isinstance(event, CallBegun)]
    late = [event for event in parse(name, [text]) if isinstance(event, CallBegun)]
    assert late[: len(early)] == early


@pytest.mark.parametrize("name", ["hermes", "hermes-list", "llama3", "mistral-args", "qwen_coder-code"])
def test_arguments_do_not_wait(name: str) -> None:
    """All but a few characters of what has been read of the arguments is out."""
    recorded = RECORDED[name]
    parser = FORMATS[recorded.format](SCHEMAS)
    begun = out = 0
    for char in recorded.text:
        events = parser.push(char)
        begun += any(isinstance(event, CallBegun) for event in events)
        out += sum(len(event.text) for event in events if isinstance(event, Arguments))
        if begun == 1 and char == "P":
            assert out == len('{"city": "P')
    assert out > 0


def test_the_time_grows_with_the_text() -> None:
    """A tenth of a second; with the square of the text it would be minutes."""
    text = json.dumps(
        {"name": "write", "arguments": {"text": 'def f(x):\n\treturn "<b>" + {x}  # é 😀\n' * 3_000}}
    )
    parser = FORMATS["hermes"](SCHEMAS)
    started = time.process_time()
    for piece in [
        "several words " * 3_000,
        "<tool_call>",
        *(text[at : at + 4] for at in range(0, len(text), 4)),
    ]:
        parser.push(piece)
    assert parser.num_calls == 1
    for before in ("", "<function=write>\n<parameter=text>\n"):
        FORMATS["qwen_coder"](SCHEMAS).push(before + ("\n<" + "x" * 998) * 20_000)
    assert time.process_time() - started < 20


def test_fields_that_are_no_part_of_a_call() -> None:
    text = '{"id": 7, "name": "now", "name": "x", "arguments": {}, "arguments": {"a": 1}}'
    assert calls_of(parse("hermes", [f"<tool_call>{text}</tool_call>"])) == (("now", {}),)
