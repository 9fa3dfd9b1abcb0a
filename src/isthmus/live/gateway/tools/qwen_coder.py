"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>value</parameter>...</function></tool_call>`.

Values are plain text on lines of their own; the function's schema gives their JSON type. A string is streamed; any
other value is given out when it is complete. The model may leave `<tool_call>` out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isthmus.live.gateway.schemas.grammar import literal
from isthmus.live.gateway.schemas.reading import FORMATS, SchemaError
from isthmus.live.gateway.tools.json_calls import CLOSE, OPEN, HermesParser
from isthmus.live.gateway.tools.lark import (
    ANY_ARGUMENTS,
    STRING,
    TEXT,
    AnswerForm,
    CallRules,
    Schemas,
    answer,
    as_json,
    kinds_of,
    properties_of,
    required_of,
    resolved,
)
from isthmus.live.gateway.tools.parser import SPACE, Finding, MalformedError, Reading

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^\s<>]*")
_LINE = re.compile(r"[^\n<]*")


class QwenCoderParser(HermesParser):
    name, openings, markers = "qwen_coder", (OPEN,), (OPEN, CLOSE, FUNCTION)

    _value_ends: Callable[[], None] | None = None
    """Gives out the value being read, when the answer ends inside it."""

    def flush(self) -> Sequence[Finding]:
        if self._value_ends:
            self._value_ends()
            self.drop()
        return super().flush()

    def body(self, mark: str) -> Reading[None]:
        if mark == OPEN:
            yield from self.span(SPACE)
            if (yield from self.peek()) in "{[":
                yield from self.calls()
                return
            if not (yield from self.word(FUNCTION)):
                raise MalformedError
        name = yield from self._name()
        self.begin(name)
        yield from self._parameters(self.schemas.get(name))

    def _parameters(self, schema: Any) -> Reading[None]:
        """All parameters as one JSON object, which is closed whatever follows."""
        properties = properties_of(schema)
        num_given, word = 0, ""
        try:
            while True:
                if word not in (PARAMETER, END_FUNCTION):
                    yield from self.span(SPACE)
                    word = yield from self.word(PARAMETER, END_FUNCTION)
                if word != PARAMETER:
                    break
                key = yield from self._name()
                self.drop()
                self.emit_arguments(
                    ("{" if num_given == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": "
                )
                num_given += 1
                word = yield from self._value(kinds_of(properties.get(key), schema))
        finally:
            self.emit_arguments("}" if num_given else "{}")
        if not word:
            raise MalformedError
        self.drop()

    def _value(self, kinds: frozenset[str]) -> Reading[str]:
        """The value of one parameter; returns the mark that ended it."""
        if (yield from self.peek()) == "\n":
            self.take()
            self.drop()
        if kinds == STRING:
            self.emit_arguments('"')
            self._value_ends = self._emit_text
            end = yield from self._lines(self._emit_text)
            self.emit_arguments('"')
        else:
            pieces: list[str] = []
            self._value_ends = lambda: self.emit_arguments("".join(pieces))
            end = yield from self._lines(lambda: pieces.append(self.held()))
            self.emit_arguments(as_json("".join(pieces), kinds))
        self._value_ends = None
        self.drop()
        return end

    def _lines(self, put: Callable[[], None]) -> Reading[str]:
        """The text up to the parameter's end and the line break before; calls `put` with each piece held. The model
        may forget that end: at the start of a line, the next parameter or the function's end also ends the value."""
        while True:
            char = yield from self.peek()
            if char == "<":
                others = (PARAMETER, END_FUNCTION) if self.held() == "\n" else ()
                if end := (yield from self.word(END_PARAMETER, *others)):
                    return end
            elif char == "\n":
                if self.held():  # another line break, or a beginning of the end mark
                    put()
                    self.drop()
                self.take()
                continue
            else:
                self._take_match(_LINE)
            put()
            self.drop()

    def _emit_text(self) -> None:
        """Gives out held text as a piece of a string."""
        self.emit_arguments(json.dumps(self.held(), ensure_ascii=False)[1:-1])

    def _name(self) -> Reading[str]:
        name = yield from self.span(_NAME)
        if not name or (yield from self.peek()) != ">":
            raise MalformedError
        self.take()
        return name

    @staticmethod
    def grammar(schemas: Schemas, asked: AnswerForm) -> str:
        """Calls, with parameters in the order of the schema. Raises SchemaError for constraints on strings, which text
        between marks cannot follow."""
        rules = CallRules(asked)
        functions = []
        for name, schema in schemas.items():
            inner = " ".join(_parameters_of(rules, schema))
            functions.append(f"{literal(f'{FUNCTION}{name}>' + chr(10))} {inner}")
        return answer(rules, OPEN, f'"\\n" {rules.any_of(functions)} "\\n" {rules.mark(CLOSE)}', "\n", asked)


_CONSTRAINED = ("pattern", "minLength", "maxLength", "format")
_COMBINED = ("allOf", "anyOf", "oneOf", "not", "if", "minProperties", "patternProperties", "propertyNames")


def _parameters_of(rules: CallRules, schema: Mapping[str, Any]) -> Sequence[str]:
    if schema is ANY_ARGUMENTS:
        return [rules.rule(TEXT, options=f"[suffix={literal(END_FUNCTION)}]")]
    root = resolved(schema, schema)
    for word in _COMBINED:
        if word in root:
            raise SchemaError(f"{word!r} cannot be followed in this format")
    required = required_of(root)
    properties = {**{name: {} for name in required}, **properties_of(schema)}
    found = []
    for name, inner in properties.items():
        head = literal(f"{PARAMETER}{name}>\n")
        value = _value_of(rules, resolved(inner, schema), schema)
        parameter = rules.rule(f"{head} {value}")
        found.append(parameter if name in required else f"{parameter}?")
    return [*found, literal(END_FUNCTION)]


def _value_of(rules: CallRules, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    end = f"\n{END_PARAMETER}\n"
    kinds = kinds_of(schema, root)
    if "string" not in kinds:
        definitions = {word: root[word] for word in ("$defs", "definitions") if word in root}
        return f"{rules.json({**schema, **definitions})} {literal(end)}"
    words = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(words, list):
        written = [word if isinstance(word, str) else json.dumps(word) for word in words]
        return f"{rules.any_of([literal(word) for word in written])} {literal(end)}"
    for word in _CONSTRAINED:
        if word in schema and (word != "format" or schema[word] in FORMATS):
            raise SchemaError(f"{word!r} of a string cannot be followed in this format")
    return rules.rule(TEXT, options=f"[suffix={literal(end)}]")
