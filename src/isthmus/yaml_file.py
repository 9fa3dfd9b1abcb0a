"""A YAML or JSON file that a person wrote: its values as they are meant, and the line of each.

YAML as version 1.2 reads it: `010000` is ten thousand and `1e3` a number, while `no`, `on`, `1:30` and `2026-11-26`
are texts; beside that `1_000`, and `<<`, which merges mappings. Keys are texts. Bytes, depth and values are bounded,
those that aliases repeat counted each time. Knows no option.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from isthmus.core.errors import ConfigError

MAX_BYTES = 4 << 20
MAX_DEPTH = 64
MAX_VALUES = 1 << 18
_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_INT = re.compile(r"[-+]?[0-9](_?[0-9])*|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9](_?[0-9])*(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_SCHEMA = (
    ("null", re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", re.compile(f"{_FLOAT.pattern}|{_NOT_FINITE.pattern}"), list("-+.0123456789")),
    ("merge", re.compile("<<"), ["<"]),
)
_HINTS = (
    ("'\\t'", "tabs do not indent; use spaces"),
    ("cannot start any token", "a text that begins so needs quotes"),
    ("alphabetic or numeric", "a text that begins with * or & needs quotes"),
    ("escape character", "\\ means something in double quotes; use single ones, or none"),
    ("single document", "the file has a second document; leave all but one out, and ---"),
    (
        "mapping values",
        "a second colon in one line, or wrong indentation; texts with a colon and a space need quotes",
    ),
    ("expected <block end>", "this does not stand below what is above; check the indentation"),
)
"""Words of a parser's complaint, and the same for whoever wrote the file."""


class _YamlLoader(yaml.SafeLoader):
    """Composes nodes, which this module makes values of. Numbers and the rest are told apart by `_SCHEMA` alone."""

    yaml_implicit_resolvers: dict[str, Any] = {}
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(None, None, f"nested deeper than {MAX_DEPTH}", mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


for _name, _pattern, _first in _SCHEMA:
    _YamlLoader.add_implicit_resolver(f"{_TAG}{_name}", re.compile(rf"(?:{_pattern.pattern})\Z"), _first)


class Document:
    """The values of a file: texts, whole numbers, numbers, true, false, None, lists, and mappings with texts as keys.

    A location is the keys and list indices from the top down to a value.
    """

    def __init__(self, path: Path, data: bytes) -> None:
        """Raises ConfigError, with the line, for what is no mapping, or has a key twice."""
        self._path, self._data, self._is_json = path, data, path.suffix == ".json"
        values = self._json() if self._is_json else _Values(path).of(self._root, ())
        if values is None:
            values = {}
        if not isinstance(values, dict):
            hint = "; after a colon there is a space" if isinstance(values, str) and ":" in values else ""
            raise ConfigError(
                f"{path}: expected keys and values at the top, found {type(values).__name__}{hint}"
            )
        self.values: dict[str, Any] = values

    @cached_property
    def _root(self) -> yaml.Node | None:
        """Bytes are parsed, since the parser knows UTF-16 and a byte order mark."""
        try:
            data = self._data.replace(b"\t", b" ") if self._is_json else self._data
            return _YamlLoader(data).get_single_node()
        except yaml.MarkedYAMLError as error:
            mark, problem = error.problem_mark or error.context_mark, str(error.problem).removeprefix("but ")
            line = f":{mark.line + 1}" if mark is not None else ""
            hint = next((f" ({hint})" for words, hint in _HINTS if words in f"{problem} {error.context}"), "")
            raise ConfigError(f"{self._path}{line}: not valid YAML: {problem}{hint}") from None
        except yaml.reader.ReaderError as error:
            number = self._data.count(b"\n", 0, error.position) + 1
            raise ConfigError(
                f"{self._path}:{number}: not valid YAML: no text in UTF-8 or UTF-16 ({error.reason})"
            ) from None

    def _json(self) -> Any:
        """JSON has its own reader, since not all of it is YAML; YAML's finds the lines, of most."""
        try:
            return json.loads(self._data, object_pairs_hook=_unique)
        except (_DoubledKey, ValueError, RecursionError) as error:
            if isinstance(error, _DoubledKey):
                _Values(self._path).of(self._root, ())  # which says in which lines
            raise ConfigError(f"{self._path}: not valid JSON: {error}") from None

    def line(self, location: Sequence[str | int]) -> int | None:
        """Where the key at the location stands, or the innermost one around it that is in the file."""
        marks = [key.start_mark.line + 1 for key, _ in self._way(location)]
        return marks[-1] if marks else None

    def text(self, location: Sequence[str | int]) -> str | None:
        """A number, a true or a false as it is written; None for anything else."""
        way = list(self._way(location))
        node = way[-1][1] if way and len(way) == len(location) else None
        return str(node.value) if isinstance(node, yaml.ScalarNode) and node.tag != f"{_TAG}null" else None

    def _way(self, location: Sequence[str | int]) -> Iterator[tuple[yaml.Node, yaml.Node]]:
        """Key and value at each step of a location, as far as the file has them."""
        try:
            node = self._root
        except ConfigError:  # of JSON that is no YAML
            return
        for depth, part in enumerate(location):
            if isinstance(node, yaml.MappingNode):
                pairs = _pairs(self._path, node, location[:depth])
                if part not in pairs:
                    return
                key, node = pairs[str(part)]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                key = node = node.value[part]
            else:
                return
            yield key, node


def read_document(path: Path) -> Document:
    """Raises ConfigError, with the line, for a file that cannot be read, is no mapping, or has a key twice."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES >> 20} MiB, which no such file is")
    return Document(path, data)


class _DoubledKey(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _DoubledKey(f"{key!r}: a second time in one object; put all of it in one")
        found[key] = value
    return found


_Location = Sequence[str | int]
_Pair = tuple[yaml.Node, yaml.Node]


class _Values:
    """Values of nodes, so many at most, however often an alias repeats them."""

    def __init__(self, path: Path) -> None:
        self._path, self._left = path, MAX_VALUES

    def of(self, node: yaml.Node | None, at: _Location) -> Any:
        self._left -= 1
        if node is None:
            return None
        if self._left < 0 or len(at) > MAX_DEPTH:
            raise _wrong(self._path, node, "too many values: an alias in itself, or aliases of aliases")
        if isinstance(node, yaml.ScalarNode):
            return _scalar(self._path, node)
        if node.tag not in (f"{_TAG}seq", f"{_TAG}map"):
            raise _unknown_tag(self._path, node)
        if isinstance(node, yaml.SequenceNode):
            return [self.of(each, (*at, index)) for index, each in enumerate(node.value)]
        pairs = _pairs(self._path, node, at)
        return {name: self.of(value, (*at, name)) for name, (_, value) in pairs.items()}


def _pairs(path: Path, node: yaml.Node, at: _Location, depth: int = 0) -> dict[str, _Pair]:
    """Key and value of a mapping by the key's text, with what it merges, which its own keys override."""
    own: dict[str, _Pair] = {}
    merged: dict[str, _Pair] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _wrong(path, key, "a key is a text, no list and no mapping")
        if key.value in own:
            name, first = ".".join(map(str, (*at, key.value))), own[key.value][0].start_mark.line + 1
            shown = name if name.isprintable() else repr(name)
            raise _wrong(path, key, f"{shown}: a second time, first in line {first}; put all of it in one")
        own[key.value] = (key, value)
        if key.tag == _MERGE:
            for each in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if not isinstance(each, yaml.MappingNode) or depth > MAX_DEPTH:
                    raise _wrong(path, key, "<< merges other mappings: <<: *NAME, or <<: [*NAME, *OTHER]")
                merged = _pairs(path, each, at, depth + 1) | merged
    return merged | {name: pair for name, pair in own.items() if pair[0].tag != _MERGE}


def _scalar(path: Path, node: yaml.ScalarNode) -> Any:
    kind, text = node.tag.removeprefix(_TAG), str(node.value)
    if kind in ("str", "merge"):
        return text
    if kind == "null":
        return None
    if kind == "bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        if kind == "int" and _INT.fullmatch(text):
            return int(text, 8 if text.startswith("0o") else 16 if text.startswith("0x") else 10)
        if kind == "float":
            return float(text.replace(".", "", 1) if _NOT_FINITE.fullmatch(text) else text)
    except ValueError:  # of Python, which reads some thousands
        raise _wrong(path, node, "a number of too many digits") from None
    raise _unknown_tag(path, node)


def _unknown_tag(path: Path, node: yaml.Node) -> ConfigError:
    return _wrong(path, node, f"{node.tag.replace(_TAG, '!!')} is no tag of this; leave it out")


def _wrong(path: Path, node: yaml.Node, what: str) -> ConfigError:
    return ConfigError(f"{path}:{node.start_mark.line + 1}: {what}")
