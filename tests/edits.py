"""Small changes of the code, found by names: of a function, a class or a constant, and of what is changed in it.

    never WORDS       the condition that mentions all these words does not hold; a part of `and` or `or` is one, too
    always WORDS      it holds
    skip WORDS        the statement that mentions them is left out
    WORDS is VALUE    the expression that mentions them is VALUE
    returns VALUE     the function does nothing but return VALUE

A word is a name of any kind, a number, or a word of a text; `f()` is a call of f. The smallest that mentions all
words is meant, and there must be one of it; `every` before an edit means each that there is. So another layout, or
more lines around it, are no matter to an edit, nor are names of locals that it does not mention.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

SOURCES = ("src", "connectors/vllm/src")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Stale(Exception):
    """A symbol or an edit that the code of today has no place for, or several."""


class Edit(NamedTuple):
    kind: str
    words: frozenset[str]
    value: ast.AST
    every: bool

    def takes(self, num: int) -> bool:
        """Whether it may be made in so many places."""
        return num == 1 or (self.every and num > 1)


class Slot(NamedTuple):
    """A node, and the field of another that holds it."""

    owner: ast.AST
    field: str
    at: int | None
    node: ast.AST

    def put(self, node: ast.AST) -> None:
        if self.at is None:
            setattr(self.owner, self.field, node)
        else:
            getattr(self.owner, self.field)[self.at] = node


class Code:
    """A module's tree, and the words that each of its nodes mentions."""

    def __init__(self, source: str) -> None:
        self.tree = ast.parse(source)
        self.words: dict[ast.AST, set[str]] = {}
        self._read(self.tree)

    def owners(self, symbol: str) -> list[ast.AST]:
        """The definitions of `module:Class.method`: several if a name is bound several times. Raises Stale."""
        found: list[ast.AST] = [self.tree]
        for name in symbol.rpartition(":")[2].split("."):
            found = [node for owner in found for node in scope(owner) if name in bound(node)]
        if not found:
            raise Stale(f"there is no {symbol}")
        return found

    def places(self, owner: ast.AST, edit: Edit) -> list[Slot]:
        """The smallest parts of a definition that fit the edit."""
        if edit.kind == "returns":
            return [Slot(owner, "body", 0, owner.body[0])] if isinstance(owner, DEFINITIONS) else []
        if not edit.words <= self.words[owner]:
            return []
        found = [
            slot for slot in slots(owner) if edit.words <= self.words[slot.node] and _fits(slot, edit.kind)
        ]
        nodes = {slot.node for slot in found}
        return [slot for slot in found if not any(inner.node in nodes for inner in slots(slot.node))]

    def change(self, symbol: str, text: str) -> None:
        """Makes an edit in the tree. Raises Stale."""
        edit, owners = parsed(text), self.owners(symbol)
        used = {node.id for node in ast.walk(edit.value) if isinstance(node, ast.Name)}
        # Else a test would fail for what the edit says, not for what it takes away.
        if unknown := used - self.words[self.tree] - set(dir(builtins)):
            raise Stale(f"nothing in the module is named {', '.join(sorted(unknown))}, as {text!r} has it")
        found = [slot for owner in owners for slot in self.places(owner, edit)]
        if not edit.takes(len(found)):
            raise Stale(f"{text!r} has {len(found) or 'no'} places in {symbol}")
        for slot in found:
            slot.put(edit.value)
        self._read(self.tree)

    def _read(self, node: ast.AST) -> set[str]:
        words = self.words[node] = set(_said(node))
        for part in ast.iter_child_nodes(node):
            words |= self._read(part)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            words.clear()  # a docstring
        return words


def parsed(text: str) -> Edit:
    """Raises Stale for what is no edit."""
    plain = text.removeprefix("every ")
    kind, _, words = plain.partition(" ")
    value: ast.AST = ast.Pass()
    try:
        if kind == "returns":
            words, value = "", ast.Return(ast.parse(words, mode="eval").body)
        elif kind in ("never", "always"):
            value = ast.Constant(kind == "always")
        elif kind != "skip":
            words, kind, value_text = plain.partition(" is ")
            value = ast.parse(value_text, mode="eval").body
    except SyntaxError:
        raise Stale(f"{text!r} is no edit") from None
    numbers = {word: repr(ast.literal_eval(word)) for word in words.split() if word[0].isdigit()}
    return Edit(kind, frozenset(numbers.get(word, word) for word in words.split()), value, text != plain)


def held(owner: ast.AST) -> Iterator[Slot]:
    """A node's own parts."""
    for field, value in ast.iter_fields(owner):
        for at, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(node, ast.AST):
                yield Slot(owner, field, at, node)


def slots(owner: ast.AST) -> Iterator[Slot]:
    """All inside of a node."""
    for slot in held(owner):
        yield slot
        yield from slots(slot.node)


def scope(owner: ast.AST) -> Iterator[ast.AST]:
    """All that belongs to a definition and to none inside of it."""
    for node in ast.iter_child_nodes(owner):
        yield node
        if not isinstance(node, DEFINITIONS):
            yield from scope(node)


def bound(node: ast.AST) -> list[str]:
    """The names that a definition or an assignment binds."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def path_of(symbol: str, root: Path) -> Path:
    """The file of its module, below `root`. Raises Stale."""
    module = symbol.partition(":")[0]
    for source in SOURCES:
        for end in (".py", "/__init__.py"):
            if (path := root / source / (module.replace(".", "/") + end)).exists():
                return path
    raise Stale(f"there is no module {module}")


def _fits(slot: Slot, kind: str) -> bool:
    owner, node = slot.owner, slot.node
    if kind == "skip":
        return isinstance(node, ast.stmt)
    if kind not in ("never", "always"):
        return isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", None), ast.Load | None)
    if slot.field in ("test", "ifs", "guard") or isinstance(owner, ast.BoolOp):
        return isinstance(node, ast.expr)
    return _is_not(node) or (isinstance(node, ast.BoolOp | ast.Compare) and not _is_not(owner))


def _is_not(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _said(node: ast.AST) -> Iterable[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
            return [name]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return [f"{name}()"]
        case ast.alias(name=name, asname=other):
            return [other or name]
        case ast.Constant(value=str(text)):
            return text.split()
        case ast.Constant(value=value):
            return [repr(value)]
    return []
