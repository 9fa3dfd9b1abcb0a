"""Reads an answer piece by piece and separates calls from content; the base of all formats.

A format is a generator that reads as if the whole answer were there: wherever the text ends, it waits for more. So
its findings cannot depend on where the text was cut.

    answer   Let me see.  <tool_call>{"name": "f",  "arguments": {"a": 1}  }</tool_call>
             content      held: not known yet       arguments              held, and dropped with the call

Held text that turns out to be no call becomes content, so nothing that the model wrote is lost.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar, TypeVar

from isthmus.live.gateway.tools.lark import AnswerForm, Schemas


@dataclass(frozen=True)
class Content:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A call has begun; `index` counts from 0. Its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True)
class Arguments:
    """The next piece of the latest call's arguments: JSON as the model wrote it."""

    index: int
    text: str


Finding = Content | CallBegun | Arguments


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """The findings with neighbouring pieces of the same text joined."""
    made: list[Finding] = []
    for _, neighbours in groupby(findings, lambda each: (type(each), getattr(each, "index", 0))):
        first, *more = neighbours
        if not isinstance(first, CallBegun) and more:
            first = replace(first, text="".join(getattr(each, "text", "") for each in (first, *more)))
        made.append(first)
    return made


T = TypeVar("T")
Reading = Generator[None, None, T]
"""A generator that ends with a T once it has read enough."""

SPACE = re.compile(r"[ \t\r\n]*")


class MalformedError(Exception):
    """The text read is no call. The character that shows it is not taken yet."""


class CallParser:
    """The parser of one answer in one format, and that format's grammar. `schemas`: of the functions' parameters, by
    name."""

    name: ClassVar[str]
    openings: ClassVar[tuple[str, ...]]
    """The beginnings of a call that follows the grammar, without white space."""
    markers: ClassVar[tuple[str, ...]]
    """Texts of the format that may be special tokens."""

    def __init__(self, schemas: Schemas) -> None:
        self.num_calls = 0
        self.streams = False  # text being read is arguments
        self.schemas = schemas
        self._text = ""
        self._at = 0  # taken characters of `_text`
        self._held: list[str] = []
        self._found: list[Finding] = []
        self._reading = self.read()
        next(self._reading)

    @staticmethod
    def grammar(schemas: Schemas, asked: AnswerForm) -> str:
        """Lark of an answer whose calls follow the schemas. Raises SchemaError."""
        raise NotImplementedError

    def push(self, text: str) -> Sequence[Finding]:
        """The findings that `text` settles."""
        self._text, self._at = text, 0
        next(self._reading)
        return self._settled()

    def flush(self) -> Sequence[Finding]:
        """The findings at the end of the answer: held text is content, unless it follows a call (white space, half a
        mark or the head of a call that was cut off)."""
        if self.num_calls:
            self.drop()
        self.emit_content()
        return self._settled()

    def _settled(self) -> Sequence[Finding]:
        found, self._found = self._found, []
        return merged(found)

    def read(self) -> Reading[None]:
        """Reads the answer; never ends."""
        while True:
            try:
                yield from self.read_call()
            except MalformedError:
                self.emit_content()

    def read_call(self) -> Reading[None]:
        """Reads content and the calls behind it. Raises MalformedError: held text is content then."""
        raise NotImplementedError

    # Steps of formats. Text that a step takes is held, unless it says otherwise.

    def peek(self) -> Reading[str]:
        """The next character, which is not taken."""
        while self._at == len(self._text):
            if self.streams:
                self.emit_held_arguments()
            yield
        return self._text[self._at]

    def take(self) -> None:
        """Takes the character that `peek` gave."""
        self._held.append(self._text[self._at])
        self._at += 1

    def span(self, characters: re.Pattern[str]) -> Reading[str]:
        """Takes all next characters of one kind; the pattern is a repeated single character."""
        taken = ""
        while True:
            yield from self.peek()
            taken += self._take_match(characters)
            if self._at < len(self._text):
                return taken

    def _take_match(self, characters: re.Pattern[str]) -> str:
        """Takes the characters of this kind that have arrived."""
        match = characters.match(self._text, self._at)
        assert match  # repeated characters always match, if only nothing
        self._held.append(match[0])
        self._at = match.end()
        return match[0]

    def word(self, *words: str) -> Reading[str]:
        """Takes and returns the one of `words` that comes next, or returns ""; characters that matched are held. No
        word begins with another, and their first characters occur nowhere else in them."""
        read = ""
        while True:
            char = yield from self.peek()
            if not any(word.startswith(read + char) for word in words):
                return ""
            self.take()
            read += char
            if read in words:
                return read

    def content_until(self, *marks: str, before: str = "") -> Reading[str]:
        """Content up to the next of `marks`, which is held with the white space before it; or up to one of the
        characters `before`, which is not taken: returns "" then."""
        starts = "".join(sorted({re.escape(each[0]) for each in (*marks, *before)}))
        words = re.compile(rf"(?:[ \t\r\n]*+[^{starts} \t\r\n]++)*+")
        while True:
            char = yield from self.peek()
            if char in before:
                return ""
            if self._take_match(words):
                self.emit_content()
            elif any(mark[0] == char for mark in marks):
                if found := (yield from self.word(*marks)):
                    return found
                self.emit_content()
            else:
                yield from self.span(SPACE)

    def held(self) -> str:
        return "".join(self._held)

    def drop(self) -> None:
        """Drops held text: it was part of a call."""
        self._held.clear()

    def emit_content(self) -> None:
        """Gives out held text as content."""
        if text := self.held():
            self._found.append(Content(text))
        self.drop()

    def begin(self, name: str) -> None:
        """Begins a call; drops held text."""
        self.drop()
        self._found.append(CallBegun(self.num_calls, name))
        self.num_calls += 1

    def captured(self, reading: Reading[None]) -> Reading[str]:
        """The text that `reading` takes; it is held, too."""
        before = len(self._held)
        yield from reading
        return "".join(self._held[before:])

    def streamed(self, reading: Reading[None]) -> Reading[None]:
        """Gives out everything that `reading` takes as arguments."""
        self.streams = True
        try:
            yield from reading
        finally:
            self.emit_held_arguments()
            self.streams = False

    def emit_arguments(self, text: str) -> None:
        """Gives out a piece of the latest call's arguments."""
        if text:
            self._found.append(Arguments(self.num_calls - 1, text))

    def emit_held_arguments(self) -> None:
        """Gives out held text as arguments."""
        self.emit_arguments(self.held())
        self.drop()
