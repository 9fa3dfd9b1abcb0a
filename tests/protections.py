"""Takes away one protection at a time and sees that its test fails: `make protections ARGS="hand-over"`.

`protections.yaml` has them by what they promise: the symbol and the edit (of `edits`) that take the protection away,
and the test that fails then. Each is tried in a copy of the tree, alone, since a second check behind it must not hide
that the first is gone. `--check` runs no test: it says in seconds which edits the code of today has no place for, and
which place they may have. `--moved` writes that into the table where a symbol of the same name is the only one.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from isthmus.yaml_file import read_document
from tests.edits import SOURCES, Code, Stale, bound, parsed, path_of, scope
from tests.scratch import ROOT, copied, environment

TABLE = ROOT / "tests/protections.yaml"
LIMIT_S = 240


class Protection(NamedTuple):
    """`symbol`: `package.module:Class.method`, of which all edits are made."""

    what: str
    symbol: str
    edits: tuple[str, ...]
    test: str

    def code(self, root: Path = ROOT) -> Code:
        return Code(path_of(self.symbol, root).read_text())

    def edited(self, root: Path = ROOT) -> str:
        """Its module without it. Raises Stale."""
        code = self.code(root)
        for edit in self.edits:
            code.change(self.symbol, edit)
        return ast.unparse(code.tree)


def protections(word: str = "") -> list[Protection]:
    """Those whose name has the word in it."""
    found = []
    for what, row in read_document(TABLE).values.items():
        test = row.pop("test")
        ((symbol, edits),) = row.items()
        found.append(Protection(what, symbol, tuple(edits) if isinstance(edits, list) else (edits,), test))
    return [one for one in found if word in one.what]


def complaint(one: Protection) -> str:
    """Why it cannot be taken away; empty when it can."""
    try:
        one.edited()
    except Stale as error:
        return str(error)
    return ""


def elsewhere(one: Protection) -> list[str]:
    """Where else its edits have one place each: where the name is the symbol's own, else in its class or its module,
    else in its room, else anywhere."""
    edits = [parsed(edit) for edit in one.edits]
    found = [
        symbol
        for symbol, node, code in _symbols()
        if symbol != one.symbol and all(edit.takes(len(code.places(node, edit))) for edit in edits)
    ]
    module = one.symbol.partition(":")[0]
    around = one.symbol.rpartition(".")[0], module + ":", module.rpartition(".")[0] + "."
    named = [symbol for symbol in found if _last(symbol) == _last(one.symbol)]
    near = ([symbol for symbol in found if symbol.startswith(start)] for start in around)
    return named or next((symbols for symbols in near if symbols), found)


def _last(symbol: str) -> str:
    return symbol.replace(":", ".").rpartition(".")[2]


@cache
def _symbols() -> list[tuple[str, ast.AST, Code]]:
    """Functions, methods and constants of the tree."""
    found = []
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT / source).with_suffix("").parts).removesuffix(".__init__")
            code = Code(path.read_text())
            found += [(f"{module}:{name}", node, code) for name, node in _below(code.tree)]
    return found


def _below(owner: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for node in scope(owner):
        for name in bound(node):
            if isinstance(node, ast.ClassDef):
                yield from ((f"{name}.{inner}", part) for inner, part in _below(node))
            else:
                yield name, node


def move(one: Protection, symbol: str) -> None:
    document, lines = read_document(TABLE), TABLE.read_text().splitlines(keepends=True)
    at = (document.line((one.what, one.symbol)) or 0) - 1
    lines[at] = lines[at].replace(one.symbol, symbol)
    TABLE.write_text("".join(lines))


def status(scratch: Path, *tests: str, limit_s: float | None = None) -> int:
    """pytest's; 1, too, when its time is up."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    env = environment(scratch, PYTHONDONTWRITEBYTECODE="1")
    try:
        return subprocess.run(command, cwd=scratch, env=env, timeout=limit_s, capture_output=True).returncode
    except subprocess.TimeoutExpired:
        return 1


def is_seen(scratch: Path, one: Protection) -> bool:
    path, edited = path_of(one.symbol, scratch), one.edited()
    source = path.read_text()
    path.write_text(edited)
    ended = status(scratch, one.test, limit_s=LIMIT_S)
    path.write_text(source)
    said = {0: "NOT SEEN", 1: "seen"}.get(ended, f"pytest ends with {ended}:")
    print(f"{said:8} {one.what}", flush=True)
    return ended == 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="?", default="", help="only those with this in their name")
    parser.add_argument("--check", action="store_true", help="only say which edits have no place")
    parser.add_argument("--moved", action="store_true", help="and write new places of symbols of the same name")
    asked = parser.parse_args()
    if not (chosen := protections(asked.word)):
        parser.error(f"no protection has {asked.word!r} in its name")
    stale = {one: why for one in chosen if (why := complaint(one))}
    for one, why in stale.items():
        others = elsewhere(one)
        perhaps = f"; perhaps {' or '.join(others[:3])}" if others else ""
        print(f"STALE    {one.what}: {why}{perhaps}{', or others' if len(others) > 3 else ''}")
        if asked.moved and len(others) == 1 and _last(others[0]) == _last(one.symbol):
            move(one, others[0])
    if asked.check or asked.moved:
        sys.exit(bool(stale))
    tried = [one for one in chosen if one not in stale]
    with tempfile.TemporaryDirectory() as folder:
        scratch = copied(Path(folder))
        if tried and status(scratch, *dict.fromkeys(one.test for one in tried)):
            raise SystemExit("the tests fail with all protections in place")
        num_seen = sum([is_seen(scratch, one) for one in tried])
    print(f"{num_seen} of {len(chosen)} are seen to be gone")
    sys.exit(num_seen < len(chosen))


if __name__ == "__main__":
    main()
