r"""Reads a JSON schema as llguidance must see it: only its constraints.

llguidance refuses by name most of what it cannot follow. The rest is settled here:

- Annotations are dropped: titles, examples, unknown formats or formats of other types than strings (JSON Schema
  2020-12, validation 7.2.3), unknown words; `$schema`, too: for an older draft llguidance ignores newer words.
- A word that is null, as clients of some languages write it, or that constrains nothing, is dropped.
- Items by place become `prefixItems`, as in newer drafts.
- `oneOf` becomes `anyOf` where no value fits two. Objects that a property distinguishes must then have it: the
  discriminator of a union often has a default.
- `$ref` is resolved, by pointer, anchor and `$id`, so that each part of a schema can stand alone.
- A schema that no finite value fits, such as one that requires itself, becomes `false`: llguidance would never end.
- Where an object may have further names, `\u` is no escape: an escaped name would evade that name's schema.
- A pattern that fits only names in `properties` is merged into these: llguidance would fail midway.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Node = Any
"""A schema: an object or a truth value."""

MAPS = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
"""Words whose value is a map of schemas."""
LISTS = frozenset({"prefixItems", "allOf", "anyOf", "oneOf"})
SINGLE = frozenset(
    {"items", "additionalItems", "contains", "unevaluatedItems", "additionalProperties", "propertyNames"}
    | {"unevaluatedProperties", "not", "if", "then", "else"}
)
"""Words whose value is a schema."""
NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
COUNTS = frozenset(
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
    | {"minContains", "maxContains"}
)
_OTHERS = frozenset(
    {"type", "const", "enum", "$ref", "required", "pattern", "uniqueItems", "dependencies", "dependentRequired"}
    | {"$dynamicRef", "$recursiveRef"}
)
_SHAPES = (
    (MAPS, ("object",)),
    (LISTS | {"enum", "required"}, ("array",)),
    (SINGLE - {"items"}, ("object", "boolean")),
    (frozenset({"items"}), ("object", "boolean", "array")),
    (frozenset({"minimum", "maximum", "multipleOf"}) | COUNTS, ("integer", "number")),
    (frozenset({"exclusiveMinimum", "exclusiveMaximum"}), ("integer", "number", "boolean")),
    (frozenset({"$ref", "pattern"}), ("string",)),
    (frozenset({"type"}), ("string", "array")),
)
"""JSON types of the values of words."""
_CONSTRAIN = (MAPS - {"$defs", "definitions"}) | LISTS | SINGLE | NUMBERS | COUNTS | _OTHERS
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
"""Formats of strings that llguidance follows."""
KINDS = ("null", "boolean", "integer", "number", "string", "array", "object")
_COMBINED = ("allOf", "$ref")
_NOTHING: Mapping[str, Sequence[Any]] = {
    "uniqueItems": [False],
    "propertyNames": [True, {}, {"type": "string"}],
    "unevaluatedItems": [True, {}],
    "unevaluatedProperties": [True, {}],
}
"""Values with which a word constrains nothing."""
_PREFIX = "#/$defs/"
_SHORT_ESCAPES = 'nrbtf\\"'
_CONTROL = re.compile(r"\\u00[01]|\x7f")
MAX_PASSES = 100
"""Passes over a schema to find its parts that no finite value fits."""


class SchemaError(Exception):
    """The reason why a schema cannot be followed, in one line."""


class ReadSchema:
    """`root`: the schema without annotations; each `$ref` in it is `#/$defs/NAME` of `definitions`, which may include
    the root. `given`: the source's options for llguidance (`x-guidance`); `options`: those to use."""

    def __init__(self, source: Node) -> None:
        """Raises SchemaError. Does not change `source`."""
        self._source = source
        given = source.get("x-guidance") if isinstance(source, Mapping) else None
        self.given: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        self._names: dict[str, str] = {}  # by reference
        self._taken: set[str] = set()
        self._waiting: list[str] = []  # references to read
        self.definitions: dict[str, Node] = {}
        self.root = self._read(source)
        while self._waiting:
            reference = self._waiting.pop()
            found = self.root if reference == "#" else self._read(self._found(reference))
            self.definitions[self._names[reference]] = found
        if self.definitions:
            self._without_endless()
        self._rewrite_one_of()
        self._merge_all_patterns()
        is_open = any(map(_is_open, self.nodes())) and not any(map(_has_control, self.nodes()))
        self.options = {"json_allowed_escapes": _SHORT_ESCAPES, **self.given} if is_open else self.given

    def target(self, node: Mapping[str, Any]) -> Node | None:
        """The schema that a node refers to; None without `$ref`."""
        reference = node.get("$ref")
        return None if reference is None else self.definitions[reference.removeprefix(_PREFIX)]

    def alone(self, node: Node) -> Node:
        """A node with all definitions that it needs to stand alone."""
        used: dict[str, Node] = {}
        waiting = [node]
        while waiting:
            for inner in _inner_first(waiting.pop()):
                name = inner.get("$ref", "").removeprefix(_PREFIX)
                if name and name not in used:
                    used[name] = self.definitions[name]
                    waiting.append(used[name])
        return {**node, "$defs": used} if used else node

    def nodes(self) -> Iterator[dict[str, Any]]:
        """All schemas that are objects: inner ones first, and referenced ones mostly before references."""
        tops = list(reversed(self.definitions.values()))
        if all(top is not self.root for top in tops):
            tops.append(self.root)
        for top in tops:
            yield from _inner_first(top)

    def _read(self, node: Node) -> Node:
        if not isinstance(node, Mapping):
            if not isinstance(node, bool):
                raise SchemaError(f"{str(node)[:50]!r} must be a schema: an object or a truth value")
            return node
        found: dict[str, Any] = {}
        for word, part in node.items():
            if word == "format":
                if _is_followed(part, node.get("type")):
                    found[word] = part
            elif (
                word not in _CONSTRAIN
                or (part is None and word != "const")
                or _is_unreachable_maximum(word, part)
            ):
                continue
            else:
                read = self._read_part(word, part)
                if read not in _NOTHING.get(word, ()):
                    found[word] = read
        other = found.pop("additionalItems", True)
        if isinstance(found.get("items"), list):
            found["prefixItems"], found["items"] = found["items"], other
        return found

    def _read_part(self, word: str, part: Any) -> Any:
        for words, kinds in _SHAPES:
            if word in words and kind_of(part) not in kinds:
                raise SchemaError(f"{word!r} must be {' or '.join(kinds)}, not {kind_of(part)}")
        if word in MAPS:
            return {name: self._read(inner) for name, inner in part.items()}
        if word in LISTS or (word in SINGLE and isinstance(part, list)):
            return [self._read(inner) for inner in part]
        if word in SINGLE:
            return self._read(part)
        if word == "$ref":
            return self._renamed(part)
        if word == "required" and not all(isinstance(name, str) for name in part):
            raise SchemaError("'required' must be names")
        if word in COUNTS and isinstance(part, float) and part.is_integer():
            return int(part)
        return _plain(part)

    def _renamed(self, reference: str) -> str:
        """The reference as written in `root`."""
        base = self._source.get("$id", self._source.get("id")) if isinstance(self._source, Mapping) else None
        if isinstance(base, str) and base.rstrip("#") and reference.startswith(base):
            reference = "#" + reference.removeprefix(base).removeprefix("#")
        reference = "#" if reference == "#/" else reference
        if reference not in self._names:
            tail = re.sub(r"[^A-Za-z0-9_.-]", "_", unquote(reference).rsplit("/", 1)[-1].strip("#")) or "root"
            name = tail
            while name in self._taken:
                name = f"{tail}-{len(self._taken)}-{len(name)}"
            self._names[reference] = name
            self._taken.add(name)
            self._waiting.append(reference)
        return _PREFIX + self._names[reference]

    def _found(self, reference: str) -> Node:
        """Raises SchemaError."""
        if reference.startswith("#/"):
            found = self._source
            for part in unquote(reference[2:]).split("/"):
                key = part.replace("~1", "/").replace("~0", "~")
                if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                    found = found[int(key)]
                else:
                    found = found.get(key) if isinstance(found, Mapping) else None
        else:
            found = _named(self._source, reference)
        if not isinstance(found, Mapping | bool):
            raise SchemaError(f"'$ref' to {reference[:100]!r}: there is no such schema in this one")
        return found

    def _without_endless(self) -> None:
        """Replaces schemas that no finite value fits by false. Raises SchemaError for the root."""
        order = list(self.nodes())
        finite: set[int] = set()
        for _ in range(MAX_PASSES):
            known = len(finite)
            finite.update(id(node) for node in order if id(node) not in finite and self._ends(node, finite))
            if len(finite) == known:
                break
        else:
            raise SchemaError(f"its references lead on more than {MAX_PASSES} deep")
        if len(finite) == len(order):
            return
        for node in order:
            for place, key in slots(node):
                if isinstance(place[key], dict) and id(place[key]) not in finite:
                    place[key] = False
        for name, node in self.definitions.items():
            if isinstance(node, dict) and id(node) not in finite:
                self.definitions[name] = False
        if isinstance(self.root, dict) and id(self.root) not in finite:
            raise SchemaError("no finite value can fit it: it requires itself")

    def _ends(self, node: Mapping[str, Any], finite: set[int]) -> bool:
        """Whether some value of known finite parts fits."""

        def ends(inner: Node) -> bool:
            return inner is not False and (not isinstance(inner, dict) or id(inner) in finite)

        if not ends(self.target(node)):
            return False
        if not all(map(ends, node.get("allOf", ()))):
            return False
        if not all(any(map(ends, node[word])) for word in ("anyOf", "oneOf") if word in node):
            return False
        kinds = kinds_of(node)
        if kinds - {"array", "object"}:
            return True
        if "array" in kinds and all(map(ends, _first_items(node))):
            return True
        num_required = len(node.get("required", ()))
        has_enough = node.get("minProperties", 0) <= num_required or any(map(ends, _further(node)))
        return "object" in kinds and has_enough and all(map(ends, _required(node)))

    def resolved(self, node: Node) -> Node:
        """A node, or the schema that it refers to."""
        seen = 0
        while isinstance(node, dict) and "$ref" in node and seen < len(self.definitions):
            node, seen = self.target(node), seen + 1
        return node

    def _rewrite_one_of(self) -> None:
        for node in self.nodes():
            if "oneOf" in node and "anyOf" not in node:
                parts = [self.resolved(each) for each in node["oneOf"] if each is not False]
                if _differ(parts, kinds_of(node)):
                    node["anyOf"] = node.pop("oneOf")

    def _merge_all_patterns(self) -> None:
        """Raises SchemaError."""
        with_patterns = [node for node in self.nodes() if "patternProperties" in node]
        if not with_patterns:
            return
        combined = any(word in node for node in self.nodes() for word in _COMBINED)
        names = {name for node in self.nodes() for name in _own_names(node)} if combined else set()
        for node in with_patterns:
            _merge_patterns(node, names)


def slots(node: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The places of the schemas directly within a node: containers and keys."""
    for word, part in node.items():
        if word in MAPS:
            yield from ((part, name) for name in part)
        elif word in LISTS:
            yield from ((part, at) for at in range(len(part)))
        elif word in SINGLE:
            yield node, word


def kinds_of(node: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that the word `type` allows."""
    named = node.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(kind for kind in named if isinstance(kind, str))
    return frozenset(KINDS)


def kind_of(value: Any) -> str:
    """The JSON type of a value."""
    if isinstance(value, Decimal):
        return "number"
    kinds = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def is_exact(number: Any) -> bool:
    """Whether llguidance, which computes in doubles, keeps this number.

    Found by trying 1.9.1: integers below 2^53, and fractions of no more digits than a double keeps, are exact as
    values and as bounds. Beyond, they are rounded (2^64 - 1 becomes 18446744073709552000), ranges that reach 2^63 are
    cut or refused, and -2^63 ends the process.
    """
    if isinstance(number, bool) or not isinstance(number, int | float | Decimal):
        return True
    if isinstance(number, Decimal):
        return number == Decimal(repr(float(number))) and is_exact(float(number))
    return abs(number) < 2**53


def _plain(value: Any) -> Any:
    """Decimals as Python's own numbers, where these are equal."""
    if isinstance(value, Decimal) and is_exact(value):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return {name: _plain(each) for name, each in value.items()} if isinstance(value, dict) else value


def _is_followed(form: Any, kinds: Any) -> bool:
    of_strings = kinds is None or kinds == "string" or (isinstance(kinds, list) and "string" in kinds)
    return of_strings and isinstance(form, str) and form in FORMATS


def _is_unreachable_maximum(word: str, count: Any) -> bool:
    """Whether a maximum is larger than any answer; llguidance overflows on it."""
    return word in COUNTS and word.startswith("max") and isinstance(count, int | float) and count >= 2**31


def _named(source: Node, reference: str) -> Node | None:
    """The schema with this anchor or `$id`."""
    waiting = [source]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Mapping):
            if reference in (node.get("$id"), node.get("id")) or reference[1:] == node.get("$anchor"):
                return node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    return None


def _inner_first(top: Node) -> Iterator[dict[str, Any]]:
    if isinstance(top, dict):
        for place, key in slots(top):
            yield from _inner_first(place[key])
        yield top


def _required(node: Mapping[str, Any]) -> Iterator[Node]:
    """Schemas of an object's required properties."""
    properties, patterns = node.get("properties", {}), node.get("patternProperties", {})
    for name in node.get("required", ()):
        if name in properties:
            yield properties[name]
        else:
            fitting = [inner for pattern, inner in patterns.items() if _fits(pattern, name)]
            yield from fitting or (node.get("additionalProperties", True),)


def _further(node: Mapping[str, Any]) -> Iterator[Node]:
    """Schemas of an object's possible properties."""
    yield node.get("additionalProperties", True)
    for word in ("properties", "patternProperties"):
        yield from node.get(word, {}).values()


def _first_items(node: Mapping[str, Any]) -> Iterator[Node]:
    """Schemas of an array's required items."""
    least, first = node.get("minItems", 0), node.get("prefixItems", [])
    yield from itertools.islice(first, max(0, math.ceil(least)))
    if least > len(first):
        yield node.get("items", True)


def _differ(nodes: Sequence[Node], kinds: frozenset[str]) -> bool:
    """Whether each value of these kinds fits at most one node: by type, or by a property with distinct constants,
    which all nodes then require."""
    each_kinds = [own_kinds(node) & kinds for node in nodes]
    apart = [{"number" if kind == "integer" else kind for kind in found} for found in each_kinds]
    if sum(map(len, apart)) == len(set().union(*apart)):
        return True
    objects = [node for node in nodes if isinstance(node, dict)]
    if len(objects) < len(nodes) or any(found != {"object"} for found in each_kinds):
        return False
    for name in objects[0].get("properties", {}):
        if _tells_apart(name, objects):
            for node in objects:
                node["required"] = [*dict.fromkeys([*node.get("required", ()), name])]
            return True
    return False


def _tells_apart(name: str, objects: Sequence[Mapping[str, Any]]) -> bool:
    words: list[Any] = []
    for node in objects:
        inner = node.get("properties", {}).get(name)
        if not isinstance(inner, dict):
            return False
        words += [inner["const"]] if "const" in inner else inner.get("enum", [None, None])
    return all(isinstance(word, str) for word in words) and len(words) == len(set(words))


def own_kinds(node: Node) -> frozenset[str]:
    """The JSON types of fitting values."""
    if not isinstance(node, dict):
        return frozenset(KINDS)
    values = [node["const"]] if "const" in node else node.get("enum")
    return kinds_of(node) if values is None else frozenset(map(kind_of, values))


def _own_names(node: Mapping[str, Any]) -> set[str]:
    return {*node.get("properties", ()), *node.get("required", ())}


def _is_open(node: Mapping[str, Any]) -> bool:
    """Whether an object may have further names, which must not be escaped spellings of others."""
    named = "properties" in node or "patternProperties" in node
    return named and node.get("additionalProperties") is not False and "object" in kinds_of(node)


def _has_control(node: Mapping[str, Any]) -> bool:
    """Whether a value has a character that JSON can only write as `\\u`."""
    values = [node[word] for word in ("const", "enum") if word in node]
    return bool(values and _CONTROL.search(json.dumps(values, default=str)))


def _merge_patterns(node: Any, elsewhere: set[str]) -> None:
    """Merges patterns that fit only the schema's own names into its properties. `elsewhere`: names of schemas that
    may be combined with this one. Raises SchemaError."""
    patterns, names = node["patternProperties"], _own_names(node)
    properties = dict(node.get("properties", {}))
    for pattern, inner in list(patterns.items()):
        some_fit = any(_fits(pattern, name) is not False for name in names | elsewhere)
        if not some_fit or _leaves_names({pattern: True}, names | elsewhere, additional=False):
            continue
        place = f"'patternProperties' {pattern[:60]!r}"
        if _leaves_names({pattern: True}, names, additional=False):
            raise SchemaError(f"{place} fits only names that schemas have which are combined with its own")
        fitting = {name: _fits(pattern, name) for name in sorted(names)}
        if None in fitting.values():
            raise SchemaError(f"{place} fits only names that 'properties' has, too")
        for name in (name for name in fitting if fitting[name]):
            properties[name] = {"allOf": [properties[name], inner]} if name in properties else inner
        del patterns[pattern]
    if properties:
        node["properties"] = properties
    forbidden = patterns and all(inner is False for inner in patterns.values())
    if forbidden and not _leaves_names(patterns, names, additional=True):
        node["additionalProperties"] = False


@cache
def _bytes() -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _leaves_names(patterns: dict[str, bool], names: set[str], *, additional: bool) -> bool:
    """Whether llguidance finds one more property than `names` possible."""
    schema = {
        "type": "object",
        "properties": dict.fromkeys(sorted(names), False),
        "patternProperties": patterns,
        "additionalProperties": additional,
        "minProperties": 1,
    }
    from llguidance import LLMatcher

    tokenizer = _bytes()
    grammar = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        return True  # reported when the whole schema is compiled
    matcher.consume_tokens(tokenizer.tokenize_str("{"))
    matcher.compute_bitmask()
    return not matcher.is_error()


def _fits(pattern: str, name: str) -> bool | None:
    """None for patterns that Python cannot read."""
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return None


def finite_number(number: Any) -> Decimal:
    """Raises SchemaError."""
    if isinstance(number, bool) or not isinstance(number, int | float | Decimal):
        raise SchemaError(f"{str(number)[:50]!r} must be a number")
    if isinstance(number, float) and not math.isfinite(number):
        raise SchemaError("a number is larger than a double can be")
    return Decimal(repr(number) if isinstance(number, float) else number)
