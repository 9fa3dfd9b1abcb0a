"""Calls written as JSON: `{"name": ..., "arguments": {...}}`, one or a list of them.

Only the frame of a call is judged. In arguments, strings and brackets are followed to find the end; whether they are
valid JSON and fit the function is left to the client.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import ClassVar

from isthmus.live.gateway.schemas.grammar import FREE, literal
from isthmus.live.gateway.tools.lark import (
    AnswerForm,
    CallRules,
    Schemas,
    answer,
    json_calls,
    parameters,
    repeated,
)
from isthmus.live.gateway.tools.parser import SPACE, CallParser, MalformedError, Reading

_IN_STRING = re.compile(r'[^"\\]*')
_BETWEEN = re.compile(r'[^"{}\[\]]*')
_SCALAR = re.compile(r"[-+.\w]*")
_CLOSERS = {"{": "}", "[": "]"}


@dataclass
class _Draft:
    """The parts of the call being read. `begun`: its name was given out, so it stays a call."""

    name: str | None = None
    arguments: str | None = None
    begun: bool = False


class JsonCallParser(CallParser):
    """Reads JSON calls; subclasses say where these stand."""

    def calls(self, *, known: bool = False) -> Reading[None]:
        """One call, or a list of them. `known`: only calls of known functions, with arguments.

        Raises MalformedError where what is held is no call; earlier calls of a list stay.
        """
        yield from self.span(SPACE)
        if (yield from self.peek()) != "[":
            yield from self._call(known)
            return
        self.take()
        while True:
            yield from self.span(SPACE)
            yield from self._call(known)
            yield from self.span(SPACE)
            if (yield from self._one_of(",]")) == "]":
                self.drop()
                return

    def value(self) -> Reading[None]:
        """One JSON value. Raises MalformedError."""
        char = yield from self.peek()
        if char == '"':
            yield from self._quoted()
        elif char in _CLOSERS:
            yield from self._bracketed()
        elif not (yield from self.span(_SCALAR)):
            raise MalformedError

    def _call(self, known: bool) -> Reading[None]:
        yield from self._one_of("{")
        draft = _Draft()
        while True:
            yield from self.span(SPACE)
            key = yield from self._string()
            yield from self.span(SPACE)
            yield from self._one_of(":")
            yield from self.span(SPACE)
            yield from self._field(key, draft, known)
            yield from self.span(SPACE)
            if (yield from self._one_of(",}")) == "}":
                break
        self._end(draft, known)

    def _field(self, key: str, draft: _Draft, known: bool) -> Reading[None]:
        if key == "name" and draft.name is None:
            draft.name = yield from self._string()
            if known and draft.name not in self.schemas:
                raise MalformedError
        elif key in ("arguments", "parameters") and draft.arguments is None and not draft.begun:
            yield from self._arguments(draft)
        else:
            yield from self.captured(self.value())

    def _arguments(self, draft: _Draft) -> Reading[None]:
        """Streams the arguments if the name is known and they are an object."""
        if draft.name is not None and (yield from self.peek()) == "{":
            draft.begun = True
            self.begin(draft.name)
            yield from self.streamed(self.value())
        else:
            draft.arguments = _as_object((yield from self.captured(self.value())))

    def _end(self, draft: _Draft, known: bool) -> None:
        if draft.name is None or (known and draft.arguments is None and not draft.begun):
            raise MalformedError
        if not draft.begun:
            self.begin(draft.name)
            self.emit_arguments(draft.arguments or "{}")
        self.drop()

    def _string(self) -> Reading[str]:
        if (yield from self.peek()) != '"':
            raise MalformedError
        text = yield from self.captured(self.value())
        try:
            return _decoded(text)
        except ValueError:
            raise MalformedError from None

    def _quoted(self) -> Reading[None]:
        self.take()
        while True:
            yield from self.span(_IN_STRING)
            char = yield from self.peek()
            self.take()
            if char == '"':
                return
            yield from self.peek()  # the escaped character
            self.take()

    def _bracketed(self) -> Reading[None]:
        closers: list[str] = []
        while True:
            char = yield from self.peek()
            if char == '"':
                yield from self._quoted()
            elif char in _CLOSERS:
                closers.append(_CLOSERS[char])
                self.take()
            elif char == closers[-1]:
                self.take()
                closers.pop()
                if not closers:
                    return
            else:
                raise MalformedError
            yield from self.span(_BETWEEN)

    def _one_of(self, characters: str) -> Reading[str]:
        char = yield from self.peek()
        if char not in characters:
            raise MalformedError
        self.take()
        return char


def _as_object(text: str) -> str:
    """Arguments written as a string may hold an object; null means none."""
    if text == "null":
        return "{}"
    if not text.startswith('"'):
        return text
    try:
        inner = _decoded(text)
        return inner if isinstance(json.loads(inner), dict) else text
    except (ValueError, RecursionError):
        return text


def _decoded(text: str) -> str:
    """The text of a JSON string. Raises ValueError, also for half a surrogate pair, which no answer can hold."""
    decoded = str(json.loads(text, strict=False))
    decoded.encode()
    return decoded


OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(JsonCallParser):
    name, openings = "hermes", (OPEN,)
    markers: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)

    def read_call(self) -> Reading[None]:
        mark = yield from self.content_until(*self.markers)
        if mark != CLOSE:
            yield from self.body(mark)
        elif self.num_calls:
            self.drop()  # the end of a call
        else:
            self.emit_content()

    def body(self, mark: str) -> Reading[None]:
        """The text behind `mark`."""
        yield from self.calls()

    @staticmethod
    def grammar(schemas: Schemas, asked: AnswerForm) -> str:
        """Calls as Qwen's templates show them, each on lines of its own."""
        rules = CallRules(asked)
        body = json_calls(rules, schemas, "arguments")
        return answer(rules, OPEN, f'"\\n" {body} "\\n" {rules.mark(CLOSE)}', "\n", asked)


TAG = "<|python_tag|>"
_SEPARATORS = re.compile(r"[; \t\r\n]*")


class Llama3Parser(JsonCallParser):
    name, openings, markers = "llama3", (TAG, '{"name":"'), (TAG,)

    def read(self) -> Reading[None]:
        mark = ""
        yield from self.span(SPACE)
        while True:
            try:
                while (yield from self.peek()) in "{[":
                    yield from self.calls(known=mark != TAG)
                    yield from self.span(_SEPARATORS)
            except MalformedError:
                self.emit_content()
            mark = yield from self.content_until(TAG, before="{")
            yield from self.span(SPACE)

    @staticmethod
    def grammar(schemas: Schemas, asked: AnswerForm) -> str:
        """One call: Llama's templates refuse to show several. Unless one is forced, an answer that begins like a call
        is one."""
        rules = CallRules(asked, FREE) if asked.otherwise else CallRules(asked)  # the alternative may be JSON
        call = json_calls(rules, schemas, "parameters")
        if asked.forced and not asked.otherwise:
            return rules.text(call)
        tagged = f" | {rules.mark(TAG)} {call}" if asked.token_of(TAG) is not None else ""
        if asked.otherwise:
            return rules.text(call + tagged)
        other = rules.rule(r"/[^{](?s:.*)/")
        return rules.text(f"({call}{tagged} | {other})?")


CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[^\s\[\]{}\"]*")


class MistralParser(JsonCallParser):
    name, openings, markers = "mistral", (CALLS,), (CALLS, ARGS, CALL_ID)

    def read_call(self) -> Reading[None]:
        yield from self.content_until(CALLS)
        yield from self.span(SPACE)
        if (yield from self.peek()) in "[{":
            yield from self.calls()
        else:
            yield from self._named()

    def _named(self) -> Reading[None]:
        name = yield from self.span(_NAME)
        yield from self.span(SPACE)
        while (yield from self.peek()) == "[":
            if (yield from self.word(ARGS, CALL_ID)) == CALL_ID:
                yield from self.span(_NAME)
            yield from self.span(SPACE)
        if not name or (yield from self.peek()) != "{":
            raise MalformedError
        self.begin(name)
        yield from self.streamed(self.value())

    @staticmethod
    def grammar(schemas: Schemas, asked: AnswerForm) -> str:
        """Calls, with names before the arguments if the model has the token for that."""
        rules = CallRules(asked)
        if asked.token_of(ARGS) is None:
            calls = repeated(json_calls(rules, schemas, "arguments"), ", ", several=asked.several)
            return answer(rules, CALLS, f'" [" {calls} "]"', "", replace(asked, several=False))
        named = [
            f"{literal(name)} {rules.mark(ARGS)} {rules.json(parameters(schema))}"
            for name, schema in schemas.items()
        ]
        return answer(rules, CALLS, rules.any_of(named), "", asked)
