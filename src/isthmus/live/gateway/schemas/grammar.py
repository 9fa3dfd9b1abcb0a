"""The Lark grammar of a JSON schema, for llguidance, which would round numbers of more digits than a double keeps.
Lark is written for such a number and the path to it (properties, items, alternatives, references); every other part
stays a schema within it (`%json`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from isthmus.live.gateway.schemas.ranges import Bound, terminal, written
from isthmus.live.gateway.schemas.reading import (
    NUMBERS,
    Node,
    ReadSchema,
    SchemaError,
    finite_number,
    is_exact,
    kind_of,
    kinds_of,
    own_kinds,
    slots,
)

MAX_CHARS = 4 << 20
"""Of Lark; grammars have lower limits."""
_WORDS_OF = {
    "integer": NUMBERS,
    "number": NUMBERS,
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
_STRING = r'/"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt]|\\u00(0[0-7beBEfF]|1[0-9a-fA-F]|7[fF]))*"/'


@dataclass(frozen=True)
class Spacing:
    """Separators and white space of JSON. `pattern`: a regex of optional white space between parts; "": none."""

    pattern: str = ""
    item: str = ","
    key: str = ":"

    @property
    def options(self) -> dict[str, Any]:
        """The spacing as llguidance's options."""
        white = {"whitespace_pattern": self.pattern} if self.pattern else {"whitespace_flexible": False}
        return {**white, "item_separator": self.item, "key_separator": self.key}


def literal(text: str) -> str:
    """A Lark string. JSON's escapes are also Lark's, which requires some of them."""
    return json.dumps(text)


FREE = Spacing(r"[\x20\x0A\x0D\x09]{1,16}")
"""Limited in length: a small model would write nothing else."""


class LarkRules:
    """Builds Lark text, rule by rule. Separators are tokenised as llguidance's own: where either may come, the lexer
    takes the longest word."""

    def __init__(self, spacing: Spacing, prefix: str = "r") -> None:
        self.spacing = spacing
        self._prefix = prefix
        self._lines: dict[str, str] = {}
        self._known: dict[str, str] = {}  # shared rules, by expression
        self._num_chars = 0

    def rule(self, expression: str, *, options: str = "", name: str = "") -> str:
        """Adds a rule; returns its name. Raises SchemaError."""
        name = name or self.reserved()
        self._lines[name] = f"{name}{options}: {expression}"
        self._num_chars += len(expression)
        if self._num_chars > MAX_CHARS:
            raise SchemaError(f"its grammar has more than {MAX_CHARS} characters")
        return name

    def reserved(self) -> str:
        """The name of a rule that is added later."""
        name = f"{self._prefix}{len(self._lines)}"
        self._lines[name] = ""
        return name

    def terminal(self, expression: str) -> str:
        """A rule of the lexer; equal expressions share one."""
        if expression not in self._known:
            name = self.reserved().upper()
            self._known[expression] = self.rule(expression, name=name)
        return self._known[expression]

    def _once(self, expression: str) -> str:
        """A rule; equal expressions share one."""
        if expression not in self._known:
            self._known[expression] = self.rule(expression)
        return self._known[expression]

    def any_of(self, expressions: Iterable[str]) -> str:
        return self.rule(" | ".join(expressions))

    @property
    def comma(self) -> str:
        return self._once(f"{self._space()} {literal(self.spacing.item)} {self._space()}")

    def pair(self, name: str, value: str) -> str:
        """A property of an object."""
        return f"{self.key(literal(json.dumps(name, ensure_ascii=False)))} {value}"

    def key(self, name: str) -> str:
        return f"{name} {self._once(f'{self._space()} {literal(self.spacing.key)} {self._space()}')}"

    def bracketed(self, marks: str, inner: str, *, optional: bool = False) -> str:
        """An array or an object with the content `inner`, which may be left out if `optional`."""
        left, right = map(literal, marks)
        inner = f"({inner} {self._space()}){'?' if optional else ''}" if inner else ""
        return f"{left} {self._space()} {inner} {right}"

    def _space(self) -> str:
        return f"{self.terminal(f'/{self.spacing.pattern}/')}?" if self.spacing.pattern else ""

    def json(self, schema: Node) -> str:
        """JSON that follows `schema`. Equal schemas share a rule. Raises SchemaError."""
        try:
            return _Json(self, ReadSchema(schema)).rule()
        except RecursionError:
            raise SchemaError("it nests too deep") from None

    def document(self, schema: Node, options: Mapping[str, Any]) -> str:
        """JSON that follows a schema without such numbers. `options`: llguidance's. Raises SchemaError."""
        schema = {} if schema is True else {"enum": []} if schema is False else schema
        document = {**schema, "x-guidance": {**self.spacing.options, **options}}
        try:  # `default`: Decimals that constrain nothing
            text = json.dumps(document, separators=(",", ":"), allow_nan=False, default=str)
        except ValueError:
            raise SchemaError("a number is larger than a double can be") from None
        return self._once(f"%json {text}")

    def lines(self) -> Iterator[str]:
        return filter(None, self._lines.values())


def schema_lark(schema: Node, spacing: Spacing) -> str:
    """Lark of an answer that follows `schema`. Raises SchemaError."""
    rules = LarkRules(spacing)
    start = rules.json(schema)
    return "\n".join((f"start: {start}", *rules.lines()))


def lark_as_read(lark: str) -> str:
    """Lark whose schemas (`%json`) are read as `LarkRules.json` reads them. Raises SchemaError."""
    pieces, added, at = list[str](), list[str](), 0
    while found := _LEXED.search(lark, at):
        if not found[0].startswith("%"):
            pieces.append(lark[at : found.end()])
            at = found.end()
            continue
        pieces.append(lark[at : found.start()])
        try:
            schema, at = _DECODER.raw_decode(lark, found.end())
        except (ValueError, ArithmeticError, RecursionError):
            raise SchemaError("behind '%json' stands no JSON") from None
        rules = LarkRules(Spacing(_ANY_SPACE), prefix=f"isthmus_json{len(pieces)}_")
        start = rules.json(schema)
        lines = list(rules.lines())
        if len(lines) == 1:
            pieces.append(f"({lines[0].removeprefix(f'{start}: ')})")
        else:
            pieces.append(f" {start} ")
            added += lines
    if added and "%lark" in lark:
        raise SchemaError("numbers with more digits than a double keeps are not followed beside '%lark'")
    return "\n".join(("".join(pieces) + lark[at:], *added))


_ANY_SPACE = r"[\x20\x0A\x0D\x09]+"
"""llguidance's default."""
_DECODER = json.JSONDecoder(parse_float=Decimal)
_LEXED = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/(?:[^/\\\n]|\\.)+/|%json\b\s*')
"""Texts that may contain the word `%json`, and the word itself."""


class _Json:
    """The rules of one schema."""

    def __init__(self, rules: LarkRules, schema: ReadSchema) -> None:
        self._rules, self._schema = rules, schema
        self._defined: dict[str, str] = {}
        self._changed = self._ids_with_changed_numbers()

    def rule(self) -> str:
        if self._changed and self._schema.given:
            raise _unfollowed("#", "'x-guidance'")
        return self._rule_of(self._schema.root, "#")

    def _document(self, node: Node) -> str:
        return self._rules.document(node, self._schema.options)

    def _ids_with_changed_numbers(self) -> set[int]:
        """Ids of the schemas in which llguidance would change a number, directly or through a reference."""
        parents: dict[int, list[int]] = {}
        waiting = []
        for node in self._schema.nodes():
            inner = [place[key] for place, key in slots(node)]
            if "$ref" in node:
                inner.append(self._schema.target(node))
            for each in inner:
                parents.setdefault(id(each), []).append(id(node))
            if _changes_number(node):
                waiting.append(id(node))
        changed: set[int] = set()
        while waiting:
            at = waiting.pop()
            if at not in changed:
                changed.add(at)
                waiting += parents.get(at, ())
        return changed

    def _rule_of(self, node: Node, place: str) -> str:
        """`place`: of the schema, for the refusal. Raises SchemaError."""
        if id(node) not in self._changed:
            return self._document(self._schema.alone(node))
        words = node.keys()
        for word in ("$ref", "anyOf", "oneOf", "allOf"):
            if word in words:
                options = [self._schema.target(node)] if word == "$ref" else node[word]
                allowed = kinds_of(node) | ({"integer"} if "number" in kinds_of(node) else set())
                is_said = all(own_kinds(self._schema.resolved(each)) <= allowed for each in options)
                self._only(node, {word, "type"} if is_said else {word}, place)
                return self._referred(node) if word == "$ref" else self._combined(word, options, place)
        for word in ("const", "enum"):
            if word in words:
                self._only(node, {word, "type"}, place)
                return self._values(node[word] if word == "enum" else [node[word]], kinds_of(node), place)
        return self._by_kind(node, place)

    def _only(self, node: Mapping[str, Any], words: set[str], place: str) -> None:
        for word in node:
            if word not in words:
                raise _unfollowed(place, repr(word))

    def _any_of(self, expressions: Sequence[str], place: str) -> str:
        if not expressions:
            raise SchemaError(f"nothing can fit {place}")
        return self._rules.any_of(expressions)

    def _referred(self, node: Mapping[str, Any]) -> str:
        """One rule for all references to a schema, which may refer to itself."""
        reference = node["$ref"]
        if reference not in self._defined:
            self._defined[reference] = name = self._rules.reserved()
            self._rules.rule(self._rule_of(self._schema.target(node), reference), name=name)
        return self._defined[reference]

    def _combined(self, word: str, options: Sequence[Node], place: str) -> str:
        """Alternatives; `allOf` only of one schema."""
        if word == "allOf" and len(options) != 1:
            raise _unfollowed(place, "'allOf' of several")
        if word == "oneOf":
            raise _unfollowed(place, "'oneOf' of schemas that may both fit")
        fitting = [(at, each) for at, each in enumerate(options) if each is not False]
        return self._any_of([self._rule_of(each, f"{place}/{word}/{at}") for at, each in fitting], place)

    def _by_kind(self, node: Mapping[str, Any], place: str) -> str:
        """A rule for each type that Lark must be written for, and one for all others."""
        self._only(node, {"type"}.union(*_WORDS_OF.values()), place)
        rules, others = [], []
        for kind in sorted(kinds_of(node)):
            own = {word: node[word] for word in node if word in _WORDS_OF.get(kind, ())}
            if kind in ("integer", "number") and _changes_number(own):
                if not (kind == "integer" and "number" in kinds_of(node)):
                    rules.append(self._number(own, place, integer=kind == "integer"))
            elif any(id(part[key]) in self._changed for part, key in slots(own)):
                rules.append(self._array(own, place) if kind == "array" else self._object(own, place))
            else:
                others.append(kind)
        if others:
            words = {word for kind in others for word in _WORDS_OF.get(kind, ())}
            rest = {"type": others, **{word: node[word] for word in node if word in words}}
            rules.append(self._document(self._schema.alone(rest)))
        return self._any_of(rules, place)

    def _number(self, node: Mapping[str, Any], place: str, *, integer: bool) -> str:
        if node.get("multipleOf", 1) != 1 or ("multipleOf" in node and not integer):
            raise _unfollowed(place, "'multipleOf'")
        bounds = []
        for word, exclusive, pick in (
            ("minimum", "exclusiveMinimum", max),
            ("maximum", "exclusiveMaximum", min),
        ):
            given = [Bound(finite_number(node[word]))] if word in node else []
            if node.get(exclusive) is True:  # as in draft 4
                given = [Bound(each.value, inclusive=False) for each in given]
            elif node.get(exclusive, False) is not False:
                given.append(Bound(finite_number(node[exclusive]), inclusive=False))
            found = pick((each.value for each in given), default=None)
            is_inclusive = all(each.inclusive for each in given if each.value == found)
            bounds.append(None if found is None else Bound(found, is_inclusive))
        try:
            lark = terminal(*bounds, integer=integer)
        except OverflowError as error:
            raise SchemaError(f"a bound at {place} cannot be followed: {error}") from None
        return self._any_of([self._rules.terminal(lark)] if lark else [], place)

    def _values(self, values: Sequence[Any], kinds: frozenset[str], place: str) -> str:
        fitting = [each for each in values if _is_of(each, kinds)]
        kept = [each for each in fitting if _all_exact(each)]
        rules = [self._value(each) for each in fitting if not _all_exact(each)]
        return self._any_of([*rules, *([self._document({"enum": kept})] if kept else [])], place)

    def _value(self, value: Any) -> str:
        """Exactly this value."""
        if isinstance(value, list):
            return self._rules.bracketed("[]", f" {self._rules.comma} ".join(map(self._value, value)))
        if isinstance(value, dict):
            pairs = (self._rules.pair(name, self._value(each)) for name, each in value.items())
            return self._rules.bracketed("{}", f" {self._rules.comma} ".join(pairs))
        if _all_exact(value):
            return self._document({"const": value})
        try:
            return literal(written(finite_number(value)))
        except OverflowError as error:
            raise SchemaError(f"a number cannot be followed: {error}") from None

    def _object(self, node: Mapping[str, Any], place: str) -> str:
        """Properties in the schema's order, as llguidance has them, then others."""
        properties, required = dict(node.get("properties", {})), node.get("required", [])
        other = node.get("additionalProperties", True)
        properties |= {name: other for name in required if name not in properties}
        pairs = []
        for name, inner in properties.items():
            if inner is not False:
                value = self._rule_of(inner, f"{place}/properties/{name[:40]}")
                pairs.append((self._rules.rule(self._rules.pair(name, value)), name in required))
            elif name in required:
                raise SchemaError(f"nothing can fit {place}: it requires {name[:40]!r}, which may not be there")
        tail = ""
        if other is not False:
            taken = " | ".join(literal(json.dumps(name, ensure_ascii=False)) for name in properties)
            key = self._rules.terminal(f"{_STRING} & ~({taken})" if taken else _STRING)
            value = self._rule_of(other, f"{place}/additionalProperties")
            tail = self._rules.rule(f"{self._rules.key(key)} {value}")
        first, rest = "", ""
        if tail:
            rest = self._rules.rule(f"({self._rules.comma} {tail})*")
            first = self._rules.rule(f"{tail} {rest}")
        for pair, needed in reversed(pairs):
            begins = f"{pair} {rest}"
            first = self._rules.rule(begins if needed or not first else f"{begins} | {first}")
            further = f"{self._rules.comma} {pair}"
            rest = self._rules.rule(f"{further if needed else f'({further})?'} {rest}")
        return self._rules.bracketed("{}", first, optional=not any(needed for _, needed in pairs))

    def _array(self, node: Mapping[str, Any], place: str) -> str:
        first, others = node.get("prefixItems", []), node.get("items", True)
        least, most = node.get("minItems", 0), node.get("maxItems")
        if others is False or (most is not None and most <= len(first)):
            most = len(first) if most is None else min(most, len(first))
        if most is not None and least > most:
            raise SchemaError(f"nothing can fit {place}: it has too few items")
        items = [self._rule_of(each, f"{place}/prefixItems/{at}") for at, each in enumerate(first[:most])]
        rest = ""
        if most is None or most > len(items):
            other = self._rule_of(others, f"{place}/items")
            items = items or [other]
            upper = "" if most is None else most - len(items)
            if upper != 0:
                rest = f"({self._rules.comma} {other}){{{max(0, least - len(items))},{upper}}}"
        for at, item in reversed(list(enumerate(items))):
            ends = at >= least and at > 0
            rest = self._rules.rule(f"{self._rules.comma if at else ''} {item} {rest}")
            rest = f"({rest})?" if ends else rest
        return self._rules.bracketed("[]", rest, optional=least == 0)


def _changes_number(node: Mapping[str, Any]) -> bool:
    """Whether llguidance would change a number of this schema itself."""
    if not all(is_exact(node[word]) for word in NUMBERS if word in node):
        return True
    values = [node["const"]] if "const" in node else node.get("enum", [])
    return not _all_exact(values) or _loses_bound(node)


def _all_exact(values: Any) -> bool:
    if isinstance(values, list):
        return all(map(_all_exact, values))
    return all(map(_all_exact, values.values())) if isinstance(values, dict) else is_exact(values)


def _loses_bound(node: Mapping[str, Any]) -> bool:
    """Fractional bounds with the same whole part: llguidance 1.9.1 takes an exclusive lower one for inclusive."""
    least, most = (
        [node[word] for word in words if isinstance(node.get(word), int | float)]
        for words in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
    )
    excludes = "exclusiveMinimum" in node or "exclusiveMaximum" in node
    is_between = excludes and least and most and int(max(least)) == int(min(most))
    return bool(is_between) and "number" in kinds_of(node)


def _is_of(value: Any, kinds: frozenset[str]) -> bool:
    kind = kind_of(value)
    return (
        kind in kinds
        or (kind == "integer" and "number" in kinds)
        or (kind == "number" and "integer" in kinds and value == Decimal(value).to_integral_value())
    )


def _unfollowed(place: str, what: str) -> SchemaError:
    reason = "with a number that has more digits than a double keeps"
    return SchemaError(f"{what} at {place} is not followed {reason}")
