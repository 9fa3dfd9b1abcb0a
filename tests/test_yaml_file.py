"""Files that people write: values as they are meant, lines of mistakes, and no file that costs more than it is."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus import yaml_file
from isthmus.core.errors import ConfigError
from isthmus.yaml_file import Document, read_document


def values(text: str, name: str = "a.yaml") -> dict[str, Any]:
    return Document(Path(name), text.encode()).values


def complaint(text: str | bytes, name: str = "a.yaml") -> str:
    with pytest.raises(ConfigError) as caught:
        Document(Path(name), text if isinstance(text, bytes) else text.encode())
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(name)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("010000", 10_000), ("-07", -7), ("+1", 1), ("1_000", 1000), ("0o17", 15), ("0x1F", 31),
        ("1e3", 1000.0), ("2e9", 2e9), ("1E-5", 1e-5), (".5", 0.5), ("1.", 1.0), ("-.inf", -math.inf),
        ("true", True), ("False", False), ("", None), ("~", None), ("null", None),
        *[(text, text) for text in "yes no on off y n 1:30 190:20:30 2026-11-26 0o9 ~/kv = 1_ _1 1__0 1e 0x".split()],
        *[(text, text) for text in (r"C:\kv", ".", "2GiB", "30s", "2026-11-26 10:00:00")],
        ("'010'", "010"), ('"true"', "true"), ("!!str 5", "5"), ("!!int '5'", 5), ("!!float 5", 5.0),
    ],
)  # fmt: skip
def test_a_value_is_what_a_person_means(written: str, meant: Any) -> None:
    found = values(f"a: {written}")["a"]
    assert (type(found), found) == (type(meant), meant)


def test_keys_are_texts() -> None:
    assert values("no: 1\n01: 2\n1: 3\n~: 4\ntrue: 5\n2026-11-26: 6") == {
        "no": 1, "01": 2, "1": 3, "~": 4, "true": 5, "2026-11-26": 6
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: 2\n'a': 3", ":3: a: a second time, first in line 1; "),
        ("a:\n  b:\n    c: 1\n    d: 2\n    c: 3", ":5: a.b.c: a second time, first in line 3; "),
        ("a:\n- b: 1\n- b: 1\n  b: 2", ":4: a.1.b: a second time, first in line 3; "),
        ("a: {b: 1, c: 2, b: 3}", ":1: a.b: a second time, first in line 1; "),
        ("x: &x {p: 1}\na:\n  <<: *x\n  p: 2\n  <<: *x", ":5: a.<<: a second time, first in line 3; "),
        ("x: &x {p: 1, p: 2}\na: {<<: *x}", ":1: x.p: a second time, first in line 1; "),
        ("1: a\n'1': b", ":2: 1: a second time, first in line 1; "),
        ('"a\\nb": 1\n"a\\nb": 2', ":2: 'a\\nb': a second time, first in line 1; "),
        ("? [a, b]\n: 1", ":1: a key is a text, no list and no mapping"),
    ],
)
def test_no_section_is_lost_to_another_of_its_name(text: str, expected: str) -> None:
    assert complaint(text).startswith(expected)


def test_no_section_of_json_is_lost_either() -> None:
    text = '{\n\t"a": {"b": 1},\n\t"c": 2,\n\t"a":{"d": 2}\n}'
    assert complaint(text, "a.json").startswith(":4: a: a second time, first in line 2; ")
    assert complaint("{]", "a.json").startswith(": not valid JSON: ")
    assert complaint("[" * 100_000, "a.json").startswith(": not valid JSON: ")


def test_what_is_merged_is_overridden_and_the_first_of_several_counts() -> None:
    text = "x: &x {p: 1, q: 1}\ny: &y {q: 2, r: 2}\na: {<<: [*x, *y], p: 0}\nb: {'<<': 5}"
    assert values(text)["a"] == {"p": 0, "q": 1, "r": 2}
    assert values(text)["b"] == {"<<": 5}
    for merged in ("5", "[1]", "*x"):
        assert complaint(f"x: &x [1]\na: {{<<: {merged}}}").startswith(":2: << merges other mappings")


LAUGHS = "a: &a [1,1,1,1,1,1,1,1]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 8)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LAUGHS, ":1: too many values: an alias in itself, or aliases of aliases"),
        ("a: &a [*a]", ":1: too many values"),
        ("a: &a {<<: *a}", ":1: << merges other mappings"),
        ("a: " + "[" * 100_000, ":1: not valid YAML: nested deeper than 64"),
        ("a:\n" + "".join(" " * depth + "-\n" for depth in range(100)), ":65: not valid YAML: nested deeper"),
        ("a: " + "9" * 5000, ":1: a number of too many digits"),
        ("a: 1\n---\nb: 2", ":2: not valid YAML: found another document (the file has a second document"),
        ("a:\n\tb: 1", ":2: not valid YAML: found character '\\t' that cannot start any token (tabs do not indent"),
        ('a: "C:\\kv"', ":1: not valid YAML: found unknown escape character 'k' (\\ means something in double"),
        ("a: b: c", ":1: not valid YAML: mapping values are not allowed here (a second colon"),
        ("a:\n  b: 1\n c: 2", ":3: not valid YAML: expected <block end>, but found '<block mapping start>' (this"),
        ("a: * b", ":1: not valid YAML: expected alphabetic or numeric character, but found ' ' (a text that begins"),
        ("a: @b", ":1: not valid YAML: found character '@' that cannot start any token (a text that begins so needs"),
        ("a: [1, 2", ":1: not valid YAML: "),
        ("a: *b", ":1: not valid YAML: found undefined alias 'b'"),
        ("a: !vault x", ":1: !vault is no tag of this; leave it out"),
        ("a: !!binary aGk=", ":1: !!binary is no tag of this"),
        ("a: !!int x", ":1: !!int is no tag of this"),
        ("a: !!set {x}", ":1: !!set is no tag of this"),
        ("port:8000", ": expected keys and values at the top, found str; after a colon there is a space"),
        ("- a", ": expected keys and values at the top, found list"),
        (b"a: \xff", ":1: not valid YAML: "),
        (b"a: \x00", ":1: not valid YAML: "),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line(text: str | bytes, expected: str) -> None:
    assert complaint(text).startswith(expected)


def test_how_a_file_was_saved_makes_no_difference(tmp_path: Path) -> None:
    text = "a: ä\r\nb: 010\r\n"
    for data in (text.encode(), text.encode("utf-8-sig"), text.encode("utf-16")):
        (tmp_path / "a.yaml").write_bytes(data)
        assert read_document(tmp_path / "a.yaml").values == {"a": "ä", "b": 10}


def test_a_file_is_read_up_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_file, "MAX_BYTES", 1 << 20)
    path = tmp_path / "a.yaml"
    path.write_bytes(b"#" * (1 << 20) + b"#")
    with pytest.raises(ConfigError, match=r"a\.yaml: larger than 1 MiB"):
        read_document(path)
    for missing in (tmp_path / "b.yaml", tmp_path):
        with pytest.raises(ConfigError, match=rf"^{missing}: cannot be read: "):
            read_document(missing)


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_lines_and_texts_are_known_by_location(name: str) -> None:
    document = Document(Path(name), b'{"a":\n [1, {"b":\n 2.50}],\n"c": null, "d": "5"}')
    assert [document.line(at) for at in (("a",), ("a", 0), ("a", 1, "b"), ("a", 1, "z"), ("z",), ())] == [
        1, 2, 2, 2, None, None
    ]  # fmt: skip
    assert document.text(("a", 1, "b")) == "2.50"
    assert [document.text(at) for at in (("a",), ("c",), ("a", 9), (), ("a", 1, "b", "z"))] == [None] * 5


TEXTS = st.text(st.characters(max_codepoint=0xD7FF), max_size=5)  # JSON escapes what is beyond in two halves
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(TEXTS, JSON, max_size=4))
def test_json_is_read_alike_as_json_and_as_yaml(written: dict[str, Any]) -> None:
    text = json.dumps(written)
    assert values(text, "a.json") == values(text) == written


PIECES = [
    *"ab1~{}[],'\"#\\@`\n\t\ufeff\x85", "010", "<<", "no", ": ", "- ", "  ", "&x ", "*x", "? ", "|\n", "...",
    "!!int ", "!!map ", "---\n", "%YAML 1.1\n",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join).map(str.encode) | st.binary(max_size=30))
def test_whatever_is_written_has_values_or_one_line(data: bytes) -> None:
    for name in ("a.yaml", "a.json"):
        said, document = f"{name}: ", None
        try:
            document = Document(Path(name), data)
        except ConfigError as error:
            said = str(error)
        assert said.startswith(name) and said.isprintable()
        assert document is None or isinstance(document.values, dict)
        assert document is None or document.line(("a",)) in (None, *range(1, 40))
