"""Which small changes a mutant may be, and where.

A statement is left out, a condition, a comparison or a sum turned round, a number changed by one. Left alone are words
(annotations, docstrings, `__repr__`), logging, assertions and `check` (tests themselves), and constants with a name (a
choice, not a rule).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from tests.edits import Slot, held
from tests.scratch import ROOT

OTHERS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.GtE), ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt, ast.LtE),
    ast.And: (ast.Or,), ast.Or: (ast.And,), ast.BitAnd: (ast.BitOr,), ast.BitOr: (ast.BitAnd,),
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.FloorDiv,), ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,), ast.Mod: (ast.FloorDiv,), ast.Break: (ast.Continue,), ast.Continue: (ast.Break,),
}  # fmt: skip
WORDS = ("__repr__", "__str__", "check", "check_idle")


class Place(NamedTuple):
    """`others`: nodes that may stand there instead."""

    path: str
    tree: ast.Module
    statement: ast.AST
    slot: Slot
    others: list[ast.AST]


class Mutant:
    """A node in the place of another. `what`: how its statement reads, and then reads: the first line that differs."""

    def __init__(self, place: Place, node: ast.AST) -> None:
        self._tree, self._slot, self._node = place.tree, place.slot, node
        self.path, self.line = place.path, getattr(place.statement, "lineno", 0)
        before = ast.unparse(place.statement).splitlines()
        self._slot.put(node)
        after = ast.unparse(node if self._slot.node is place.statement else place.statement).splitlines()
        self._slot.put(self._slot.node)
        pairs = zip_longest(before, after, fillvalue="")
        self.what = next(f"{one.strip()} -> {other.strip()}" for one, other in pairs if one != other)

    def code(self) -> str:
        self._slot.put(self._node)
        code = ast.unparse(self._tree)
        self._slot.put(self._slot.node)
        return code


def places(path: Path) -> Iterator[Place]:
    """Where something can be changed in a file."""
    tree = ast.parse(path.read_text())
    yield from _below(str(path.relative_to(ROOT)), tree, tree, tree)


def _below(path: str, tree: ast.Module, statement: ast.AST, owner: ast.AST) -> Iterator[Place]:
    for slot in held(owner):
        if not _is_quiet(slot):
            inner = slot.node if isinstance(slot.node, ast.stmt | ast.ExceptHandler) else statement
            if others := list(_others(slot)):
                yield Place(path, tree, inner, slot, others)
            yield from _below(path, tree, inner, slot.node)


def _others(slot: Slot) -> Iterator[ast.AST]:
    node = slot.node
    yield from (other() for other in OTHERS.get(type(node), ()))
    if slot.field == "test" and isinstance(node, ast.expr):
        yield ast.UnaryOp(ast.Not(), node)
    if isinstance(slot.owner, ast.For) and slot.field == "iter":
        yield ast.List([], ast.Load())
    match node:
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield from (ast.Constant(value + by) for by in (1, -1) if value + by != value)
        case ast.ExceptHandler(name=name, body=body):
            yield ast.ExceptHandler(ast.Name("ZeroDivisionError", ast.Load()), name, body)
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise() | ast.Delete():
            yield ast.Pass()
        case ast.Assign(targets=[target, *_]) | ast.AnnAssign(target=target, value=ast.expr()):
            # A plain name that is never bound would fail at once: only those that others see.
            if isinstance(target, ast.Attribute | ast.Subscript):
                yield ast.Pass()


def _is_quiet(slot: Slot) -> bool:
    match slot.owner, slot.node:
        case _, ast.Assert() | ast.keyword(arg="strict") | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case _, ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger" | "log")))):
            return True
        case _, ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name in WORDS
        case ast.Module() | ast.ClassDef(), ast.Assign() | ast.AnnAssign():
            return True
        case ast.ClassDef(), ast.keyword():
            return True
    return slot.field in ("annotation", "returns", "decorator_list")
